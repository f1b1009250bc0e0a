"""Hugging Face's Trainer with forward passes only."""

from __future__ import annotations

from transformers import Trainer

from .mixin import ZeroOrderMixin


class ZeroOrderTrainer(ZeroOrderMixin, Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` whose steps need no backward pass; see :class:`ZeroOrderMixin` for its own arguments.

    >>> args = TrainingArguments("out", learning_rate=1e-5, max_steps=1000)                     # doctest: +SKIP
    >>> trainer = ZeroOrderTrainer(model=model, args=args, train_dataset=rows, method="mezo_bcd")  # doctest: +SKIP
    >>> trainer.train()                                                                          # doctest: +SKIP
    """
