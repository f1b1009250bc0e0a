"""zeroblock inside other people's training loops: Hugging Face's Trainer, and every trainer that descends from it.

>>> trainer = zb.integrations.ZeroOrderTrainer(model=model, args=args, train_dataset=rows)     # doctest: +SKIP
>>> trainer.train()                                                                             # doctest: +SKIP

``docs/guides/trainer.md`` is the guide, with Accelerate, Lightning, Axolotl and LLaMA-Factory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .mixin import ZeroOrderMixin

if TYPE_CHECKING:
    from .trainer import ZeroOrderTrainer

__all__ = ["ZeroOrderMixin", "ZeroOrderTrainer"]


def __getattr__(name: str) -> Any:
    """Import the trainer on first use: it brings transformers' Trainer and Accelerate."""
    if name == "ZeroOrderTrainer":
        from .trainer import ZeroOrderTrainer

        return ZeroOrderTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
