"""The learning rate of a step.

It is a pure function of the step's number, so resuming needs no state.  If the length of a run is given in minutes, it
also depends on the clock, and every record keeps the rate of its step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from ..budget import Budget
from ..record import Record
from ..turn import Turns
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


def unweighted(turns: Turns, records: Iterable[Record]) -> list[float]:
    """The learning rates of steps before a schedule weighed them.

    Args:
        turns: the turns of the run.
        records: its steps, from the first.
    """
    turn, rates = turns.first(), []
    for record in records:
        rates.append(record.lr / turn.weight)
        turn = turns.after(turn, record)
    return rates


class Rates:
    """The learning rates of one session of a run.

    Args:
        config: the run's configuration.
        budget: the budget of displacement, for runs without a learning rate.
        end: the end of the session on the monotonic clock; None if it has no time limit.
        taken: the rates of the steps that earlier sessions took, without the weights of the schedule.
    """

    def __init__(self, config: Config, budget: Budget | None, end: float | None, taken: Iterable[float] = ()) -> None:
        self.config, self.budget, self.end = config, budget, end
        self._peak = None if budget is None else budget.rate(config.steps, config.lr_schedule or "linear")
        self._spent = 0.0
        self._spend(taken)
        self._first: int | None = None
        self._marks: list[tuple[int, float]] = []
        """The two latest of the session's steps 2, 4, 8, …, each with the time at which it began."""

    def at(self, step: int, left: float | None = None) -> float:
        """The learning rate of the step about to be taken; call this once per step, in order.

        Args:
            step: the step's number.
            left: the number of steps left by another process's clock; None uses this process's clock.
        """
        if self.budget is None or self.end is None:
            return lr_at(self.config, step, self._peak)
        lr = self.budget.rest(self._spent, self.left(step) if left is None else left)
        self._spend([lr])
        return lr

    def _spend(self, rates: Iterable[float]) -> None:
        if self.budget is not None:
            self._spent += sum((lr * self.budget.weight) ** 2 for lr in rates)

    def left(self, step: int) -> float:
        """The number of steps left at the present pace; without a time limit, all the configured steps left.

        The pace is that of the latest half to three quarters of the session's steps, and never that of the first two,
        because steps that compile and capture are many times as slow as those that follow.
        """
        left = float(self.config.steps - step)
        if self.end is None:
            return left
        now = time.monotonic()
        if self._first is None:
            self._first = step
        taken = step - self._first
        if taken >= 2 and (not self._marks or taken >= 2 * self._marks[-1][0]):
            self._marks = [*self._marks[-1:], (taken, now)]
        if self._marks:
            since, began = self._marks[0]
            if taken > since and now > began:
                left = min(left, max(1.0, (self.end - now) * (taken - since) / (now - began)))
        return left
