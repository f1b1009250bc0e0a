"""The learning rate of a step, a plain function of the step's number, so that resuming needs no state."""

from __future__ import annotations

import math

from .config import Config


def lr_at(config: Config, step: int) -> float:
    """Return the learning rate of a step.

    Args:
        config: its ``lr``, ``lr_schedule``, ``warmup`` and ``steps`` decide.
        step: counts from 0.

    >>> config = Config(model="m", task="t", lr=1.0, steps=4, lr_schedule="linear")
    >>> [lr_at(config, step) for step in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    """
    lr = config.lr or 0.0
    if step < config.warmup:
        return lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / (config.steps - config.warmup)
    match config.lr_schedule:
        case "linear":
            return lr * (1 - progress)
        case "cosine":
            return lr * (1 + math.cos(math.pi * progress)) / 2
        case "constant":
            return lr
