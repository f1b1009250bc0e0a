"""zeroblock inside other people's training loops: Hugging Face's Trainer, and every trainer that descends from it.

>>> trainer = zb.integrations.ZeroOrderTrainer(model=model, args=args, train_dataset=rows)     # doctest: +SKIP
>>> trainer.train()                                                                             # doctest: +SKIP

``docs/guides/trainer.md`` is the guide, with Accelerate, Lightning, Axolotl and LLaMA-Factory.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .mixin import ZeroOrderMixin
    from .trainer import ZeroOrderTrainer

_HOME = {"ZeroOrderMixin": "mixin", "ZeroOrderTrainer": "trainer"}
__all__ = ["ZeroOrderMixin", "ZeroOrderTrainer"]


def __getattr__(name: str) -> Any:
    """Import on first use: the trainer brings transformers and Accelerate."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
