"""Estimators: one scalar a direction, from forward passes.

    two-sided   c = (L(θ + εPz) - L(θ - εPz)) / 2ε
    one-sided   c = (L(θ + εPz) - L(θ)) / ε

Coefficients are rounded to fp32, so that four bytes of a journal replay a step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from .direction import Direction, Point
from .errors import ZeroBlockError
from .journal import Record

Measure = Callable[[Sequence[Point]], Sequence[float]]
"""The loss at each point; θ is the same, bit for bit, on return."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a step measured.

    Args:
        loss: of the step, for people to read.
        coeffs: one a probe, on the fp32 grid.
        losses: every loss measured, in order.
    """

    loss: float
    coeffs: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def finite(self) -> bool:
        """Whether a step can be taken on it."""
        return all(map(math.isfinite, self.coeffs))


class Estimator(Protocol):
    """Says at which points to measure, and what the losses there amount to."""

    @property
    def probes(self) -> int:
        """Directions a step."""
        ...

    def __call__(self, measure: Measure, directions: Sequence[Direction]) -> Estimate: ...


def _single(x: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(x))


@dataclasses.dataclass(frozen=True)
class _Finite:
    eps: float = 1e-3
    probes: int = 1

    def __post_init__(self) -> None:
        if not (self.eps > 0 and math.isfinite(self.eps)):
            raise ZeroBlockError(f"eps must be positive, got {self.eps}")
        if self.probes < 1:
            raise ZeroBlockError(f"probes must be at least 1, got {self.probes}")


@dataclasses.dataclass(frozen=True)
class TwoSided(_Finite):
    """Central differences along ``probes`` directions: 2·probes evaluations.

    Args:
        eps: distance of the two points from θ.
        probes: directions; the step is the mean over them.
    """

    def __call__(self, measure: Measure, directions: Sequence[Direction]) -> Estimate:
        losses = measure([Point(d, sign * self.eps) for d in directions for sign in (1, -1)])
        pairs = list(zip(losses[::2], losses[1::2], strict=True))
        coeffs = tuple(_single((plus - minus) / (2 * self.eps)) for plus, minus in pairs)
        return Estimate(sum(losses) / len(losses), coeffs, tuple(losses))


@dataclasses.dataclass(frozen=True)
class OneSided(_Finite):
    """Forward differences that share one evaluation at θ: 1 + probes evaluations."""

    def __call__(self, measure: Measure, directions: Sequence[Direction]) -> Estimate:
        base, *losses = measure([Point(directions[0], 0.0), *(Point(d, self.eps) for d in directions)])
        coeffs = tuple(_single((loss - base) / self.eps) for loss in losses)
        return Estimate(base, coeffs, (base, *losses))


@dataclasses.dataclass(frozen=True)
class Replay:
    """Measures nothing: takes the coefficients that another run recorded."""

    records: Sequence[Record]

    @property
    def probes(self) -> int:
        return len(self.records[0].coeffs)

    def __call__(self, measure: Measure, directions: Sequence[Direction]) -> Estimate:
        step = directions[0].key.step
        at = step - self.records[0].step
        if not 0 <= at < len(self.records) or self.records[at].step != step:
            raise ZeroBlockError(f"the journal has no record of step {step}")
        record = self.records[at]
        return Estimate(record.loss, record.coeffs, record.losses)
