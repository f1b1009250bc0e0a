"""Estimators: one scalar a direction, from forward passes.

    two-sided   c = (L(θ + εPz) - L(θ - εPz)) / 2ε
    one-sided   c = (L(θ + εPz) - L(θ)) / ε

Coefficients are rounded to fp32, so that four bytes of a journal replay a step.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .direction import Direction, Point
from .errors import ZeroBlockError
from .record import Record

Measure = Callable[[Sequence[Point]], Sequence[float]]
"""The loss at each point; θ is the same, bit for bit, on return."""


def clipped(coeffs: Sequence[float], limit: float | None) -> tuple[float, ...]:
    """What steps and schedules take measured coefficients for: within ±limit, if there is one."""
    return tuple(coeffs if limit is None else (max(-limit, min(limit, c)) for c in coeffs))


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


@dataclasses.dataclass(frozen=True)
class Finite(abc.ABC):
    """Finite differences: points to measure at, and arithmetic on the losses there, on whatever device they are."""

    eps: float = 1e-3
    probes: int = 1

    def __post_init__(self) -> None:
        if not (self.eps > 0 and math.isfinite(self.eps)):
            raise ZeroBlockError(f"eps must be positive, got {self.eps}")
        if self.probes < 1:
            raise ZeroBlockError(f"probes must be at least 1, got {self.probes}")

    @abc.abstractmethod
    def points(self, directions: Sequence[Direction]) -> list[Point]:
        """Where to measure."""

    @abc.abstractmethod
    def coeffs(self, losses: Tensor) -> Tensor:
        """(points,) in fp64 → (probes,) in fp32."""

    @abc.abstractmethod
    def loss(self, losses: Tensor) -> Tensor:
        """The one people read."""

    @property
    def centred(self) -> bool:
        """Whether a journal stores a centre for every probe: its mean loss minus the loss of the step."""
        return False

    def losses_of(self, loss: float, coeffs: Sequence[float], centres: Sequence[float]) -> tuple[float, ...]:
        """The losses that led to these coefficients; empty where they cannot be told.

        Args:
            loss: of the step.
            coeffs: one per probe.
            centres: one per probe, zeros unless ``centred``.
        """
        return ()

    def __call__(self, measure: Measure, directions: Sequence[Direction]) -> Estimate:
        losses = torch.tensor(measure(self.points(directions)), dtype=torch.float64)
        return Estimate(float(self.loss(losses)), tuple(self.coeffs(losses).tolist()), tuple(losses.tolist()))


@dataclasses.dataclass(frozen=True)
class TwoSided(Finite):
    """Central differences along ``probes`` directions: 2·probes evaluations.

    Args:
        eps: distance of the two points from θ.
        probes: directions; the step is the mean over them.
    """

    def points(self, directions: Sequence[Direction]) -> list[Point]:
        return [Point(direction, sign * self.eps) for direction in directions for sign in (1, -1)]

    def coeffs(self, losses: Tensor) -> Tensor:
        return ((losses[0::2] - losses[1::2]) / (2 * self.eps)).float()

    def loss(self, losses: Tensor) -> Tensor:
        return losses.mean()

    @property
    def centred(self) -> bool:
        return self.probes > 1

    def losses_of(self, loss: float, coeffs: Sequence[float], centres: Sequence[float]) -> tuple[float, ...]:
        pairs = zip(coeffs, centres, strict=True)
        return tuple(loss + centre + sign * self.eps * c for c, centre in pairs for sign in (1, -1))


@dataclasses.dataclass(frozen=True)
class OneSided(Finite):
    """Forward differences that share one evaluation at θ: 1 + probes evaluations."""

    def points(self, directions: Sequence[Direction]) -> list[Point]:
        return [Point(directions[0], 0.0), *(Point(direction, self.eps) for direction in directions)]

    def coeffs(self, losses: Tensor) -> Tensor:
        return ((losses[1:] - losses[0]) / self.eps).float()

    def loss(self, losses: Tensor) -> Tensor:
        return losses[0]

    def losses_of(self, loss: float, coeffs: Sequence[float], centres: Sequence[float]) -> tuple[float, ...]:
        return (loss, *(loss + self.eps * c for c in coeffs))


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
