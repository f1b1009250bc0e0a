"""The learning rate of a step.

It is a plain function of the step's number, so that resuming needs no state; only where a run's length is
given in minutes does it depend on the clock, and then every record keeps the rate that its step took.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from ..budget import Budget
from .config import Config


def lr_at(config: Config, step: int, peak: float | None = None) -> float:
    """Return the learning rate of a step.

    Args:
        config: its ``lr``, ``lr_schedule``, ``warmup`` and ``steps`` decide.
        step: counts from 0.
        peak: the largest rate, where the configuration has none.

    >>> config = Config(model="m", task="t", lr=1.0, steps=4, lr_schedule="linear")
    >>> [lr_at(config, step) for step in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    """
    lr = config.lr if config.lr is not None else peak or 0.0
    if step < config.warmup:
        return lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / (config.steps - config.warmup)
    match config.lr_schedule:
        case "linear":
            return lr * (1 - progress)
        case "cosine":
            return lr * (1 + math.cos(math.pi * progress)) / 2
        case _:
            return lr


class Rates:
    """The learning rates of one sitting of a run.

    Args:
        config: of the run.
        budget: of displacement, for runs without a learning rate.
        end: when the sitting ends, on the monotonic clock; None if only its steps end it.
        taken: the rates of the steps that the run has taken before.
    """

    def __init__(self, config: Config, budget: Budget | None, end: float | None, taken: Iterable[float] = ()) -> None:
        self.config, self.budget, self.end = config, budget, end
        self._peak = None if budget is None else budget.rate(config.steps, config.lr_schedule or "linear")
        self._spent = sum(lr * lr for lr in taken)
        self._first: tuple[int, float] | None = None

    def at(self, step: int, left: float | None = None) -> float:
        """The learning rate of a step that is about to be taken; ask for the steps in their order.

        Args:
            step: its number.
            left: steps that are left by the clock of another process; by default by this one's.
        """
        if self.budget is None or self.end is None:
            return lr_at(self.config, step, self._peak)
        lr = self.budget.rest(self._spent, self.left(step) if left is None else left)
        self._spent += (lr * self.budget.weight) ** 2  # records hold the product with the schedule's weight
        return lr

    def left(self, step: int) -> float:
        """Steps that are left at the pace of this sitting; those of the configuration if no clock ends it."""
        if self.end is None:
            return float(self.config.steps - step)
        now = time.monotonic()
        if self._first is None:
            self._first = step, now
        left = float(self.config.steps - step)
        first, began = self._first
        if step > first and now > began:
            left = min(left, max(1.0, (self.end - now) * (step - first) / (now - began)))
        return left
