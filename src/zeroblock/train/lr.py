"""The learning rate of a step.

It is a pure function of the step's number, so resuming needs no state.  If the length of a run is given in minutes, it
also depends on the clock, and every record keeps the rate of its step.
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
        config: provides ``lr``, ``lr_schedule``, ``warmup`` and ``steps``.
        step: the step's number, from 0.
        peak: the largest rate if ``config.lr`` is None.

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
    """The learning rates of one session of a run.

    Args:
        config: the run's configuration.
        budget: the budget of displacement, for runs without a learning rate.
        end: the end of the session on the monotonic clock; None if it has no time limit.
        taken: the rates of the steps that earlier sessions took.
    """

    def __init__(self, config: Config, budget: Budget | None, end: float | None, taken: Iterable[float] = ()) -> None:
        self.config, self.budget, self.end = config, budget, end
        self._peak = None if budget is None else budget.rate(config.steps, config.lr_schedule or "linear")
        self._spent = sum(lr * lr for lr in taken)
        self._first: tuple[int, float] | None = None

    def at(self, step: int, left: float | None = None) -> float:
        """The learning rate of the step about to be taken; call this once per step, in order.

        Args:
            step: the step's number.
            left: the number of steps left by another process's clock; None uses this process's clock.
        """
        if self.budget is None or self.end is None:
            return lr_at(self.config, step, self._peak)
        lr = self.budget.rest(self._spent, self.left(step) if left is None else left)
        self._spent += (lr * self.budget.weight) ** 2  # as recorded: with the schedule's weight
        return lr

    def left(self, step: int) -> float:
        """The number of steps left at the pace of this session; without a time limit, all the configured steps left."""
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
