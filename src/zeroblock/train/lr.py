"""The learning rate of a step, a plain function of its number: resuming needs no state."""

from __future__ import annotations

import math

from .config import Config


def rate(config: Config, step: int) -> float:
    """The learning rate of a step.

    Args:
        config: says ``lr``, ``schedule``, ``warmup`` and ``steps``.
        step: counts from 0.

    >>> config = Config(model="m", task="t", lr=1.0, steps=4, schedule="linear")
    >>> [rate(config, step) for step in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    """
    lr = config.lr or 0.0
    if step < config.warmup:
        return lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / (config.steps - config.warmup)
    match config.schedule:
        case "linear":
            return lr * (1 - progress)
        case "cosine":
            return lr * (1 + math.cos(math.pi * progress)) / 2
        case "constant":
            return lr
