"""A rule that divides coefficients by their running size."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from ..direction import Member
from ..ops.weigh import KEPT, LIMIT, NEW, NORMAL, weigh
from ..state import State
from .base import RULES, Move, Rule
from .sgd import SGD


@RULES.register
@dataclasses.dataclass(frozen=True)
class Normalized(Rule):
    """Another rule's steps, with coefficients in units of their own running size: the scale of the loss cancels.

        c ← clamp(c, ±3·size)      s ← 0.95·s + 0.05·mean|c≠0|      w ← 0.95·w + 0.05      c / size
        size = √(π/2)·(s + 0.05·S/W) / (w + 0.05)

    s and w belong to the block, S and W are the same over all steps.  Their mean S/W counts as one more visit,
    which pulls a block's size towards the others' at first.  The clamp begins with the second step.
    A size includes the step that it scales, so no step is much larger than the ones before it, except the first one
    after a beginning with coefficients of zero (16 times the usual, after a hundred of them).  The mean of
    magnitudes is more robust than the mean of squares, and needs no root, whose last bit differs between
    libraries; for normal coefficients, √(π/2) times it is the root mean square.

    The rule keeps two numbers per block, on the device of the weights.  They are a function of the records,
    and a skipped step does not change them.

    Args:
        rule: turns coefficients in these units into a step.
    """

    rule: Rule = SGD()  # noqa: RUF009 (frozen)

    block_numbers = 2

    @property
    def state(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.rule.state

    @property
    def reset(self) -> bool:  # type: ignore[override]
        return self.rule.reset

    @property
    def adds_up(self) -> bool:  # type: ignore[override]
        return self.rule.adds_up

    @property
    def carried(self) -> tuple[str, ...]:
        return self.rule.carried

    @property
    def divisible(self) -> bool:  # type: ignore[override]
        return self.rule.divisible

    def stride(self, interval: int) -> float:
        return self.rule.stride(interval)

    def shaped(self, members: Sequence[Member], state: State) -> Sequence[Member]:
        return self.rule.shaped(members, state)

    def moved(self, members: Sequence[Member], state: State) -> Sequence[Member]:
        return self.rule.moved(members, state)

    def delta(self, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        return self.rule.delta(g, state, t)

    def capturable(self, member: Member) -> bool:
        return self.rule.capturable(member)

    def factors(self, t: int) -> tuple[float, ...]:
        return self.rule.factors(t)

    def dtype(self, member: Member) -> torch.dtype:
        return self.rule.dtype(member)

    def update_(self, members: Sequence[Member], state: State, move: Move) -> None:
        self.rule.update_(members, state, move)

    def weigh(self, coeffs: Sequence[float], table: list[list[float]], block: int) -> list[float]:
        own, every = table[block], table[-1]
        size = _size(own, every)
        limit = LIMIT * size if size > 0 else math.inf
        coeffs = [max(-limit, min(limit, c)) for c in coeffs]
        mean = _sum([abs(c) for c in coeffs]) / max(1, sum(c != 0 for c in coeffs))
        for row in (own, every):
            row[:] = KEPT * row[0] + NEW * mean, KEPT * row[1] + NEW
        size = _size(own, every)
        return [c / size if size > 0 else 0.0 for c in coeffs]

    def weigh_on_device(self, coeffs: Tensor, taken: Tensor, table: Tensor, block: int) -> Tensor:
        return weigh(coeffs, taken, table, block)


def _sum(values: list[float]) -> float:
    """The sum, by adding halves, in the same order as ``ops/weigh`` on the device."""
    while len(values) > 1:
        half = len(values) // 2
        values = [*map(operator.add, values[:half], values[half : 2 * half]), *values[2 * half :]]
    return values[0]


def _size(own: Sequence[float], every: Sequence[float]) -> float:
    """The running size of a block's coefficients; 0 if there are none yet."""
    if not every[1]:
        return 0.0
    return NORMAL * ((own[0] + NEW * (every[0] / every[1])) / (own[1] + NEW))
