"""Estimators: one coefficient per direction, from forward passes.

    two-sided   c = (L(θ + εPz) - L(θ - εPz)) / 2ε
    one-sided   c = (L(θ + εPz) - L(θ)) / ε
    curvature   c as two-sided, κ = (L(θ + εPz) + L(θ - εPz) - 2·L(θ)) / ε²

An estimator says at which points to measure and how the losses there become
coefficients.  It never calls the objective itself, so the same estimator runs on
the host, on a stream and in a captured graph.  Coefficients are rounded to fp32,
so that four bytes of a journal replay a step.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence

from torch import Tensor

from .direction import Direction, Point
from .errors import ZeroBlockError
from .record import Record
from .registry import Registry

ESTIMATORS = Registry("estimator")


class Estimator(abc.ABC):
    """Chooses the points of a step and turns their losses into coefficients.

    The arithmetic must be torch's, on whatever device the losses are: on a GPU it is part of
    the submitted step, and the host never sees the numbers in between.
    """

    @property
    @abc.abstractmethod
    def probes(self) -> int:
        """Directions per step; each gets one coefficient."""

    @abc.abstractmethod
    def points(self, directions: Sequence[Direction]) -> list[Point]:
        """Where to measure, given the directions of the probes."""

    @abc.abstractmethod
    def coeffs(self, losses: Tensor) -> Tensor:
        """(points,) losses in fp64 → (probes,) coefficients in fp32."""

    @abc.abstractmethod
    def loss(self, losses: Tensor) -> Tensor:
        """(points,) losses in fp64 → the scalar that people read."""

    @property
    def curved(self) -> bool:
        """Whether ``curvatures`` are measured, which rules may need and a record keeps in the place of the centres."""
        return False

    def curvatures(self, losses: Tensor) -> Tensor:
        """(points,) losses in fp64 → (probes,) second derivatives in fp32; (0,), the default, for none."""
        return losses[:0].float()

    def recall(self, step: int) -> Record | None:
        """The record of a step that was measured before; None, the default, asks for a measurement."""
        return None

    @property
    def centred(self) -> bool:
        """Whether a record needs one more number per probe, its centre, to rebuild the losses."""
        return False

    def losses_of(self, loss: float, coeffs: Sequence[float], centres: Sequence[float]) -> tuple[float, ...]:
        """The losses that a record stands for; () where they cannot be told from it.

        Args:
            loss: the one people read.
            coeffs: (probes,).
            centres: (probes,) how far the mean of each probe's losses lies from ``loss``, or the curvatures of an
                estimator that is ``curved``; zeros unless ``centred``.
        """
        return ()


@dataclasses.dataclass(frozen=True)
class FiniteDifference(Estimator):
    """Differences of losses at a distance ``eps`` along ``probes`` directions."""

    eps: float = 1e-3
    probes: int = 1

    def __post_init__(self) -> None:
        if not (self.eps > 0 and math.isfinite(self.eps)):
            raise ZeroBlockError(f"eps must be positive, got {self.eps}")
        if self.probes < 1:
            raise ZeroBlockError(f"probes must be at least 1, got {self.probes}")


@ESTIMATORS.register
@dataclasses.dataclass(frozen=True)
class TwoSided(FiniteDifference):
    """Central differences along ``probes`` directions: 2·probes evaluations per step.

    Args:
        eps: distance of the two points from θ.
        probes: number of directions; the step is the mean over them.
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


@ESTIMATORS.register
@dataclasses.dataclass(frozen=True)
class OneSided(FiniteDifference):
    """Forward differences that share one evaluation at θ: 1 + probes evaluations per step.

    Args:
        eps: distance of the points from θ.
        probes: number of directions; the step is the mean over them.
    """

    def points(self, directions: Sequence[Direction]) -> list[Point]:
        return [Point(directions[0], 0.0), *(Point(direction, self.eps) for direction in directions)]

    def coeffs(self, losses: Tensor) -> Tensor:
        return ((losses[1:] - losses[0]) / self.eps).float()

    def loss(self, losses: Tensor) -> Tensor:
        return losses[0]

    def losses_of(self, loss: float, coeffs: Sequence[float], centres: Sequence[float]) -> tuple[float, ...]:
        return (loss, *(loss + self.eps * c for c in coeffs))


@ESTIMATORS.register
@dataclasses.dataclass(frozen=True)
class Curvature(FiniteDifference):
    """Central differences, and second differences with one more evaluation at θ: 1 + 2·probes evaluations per step.

        c = (L(θ + εPz) - L(θ - εPz)) / 2ε        κ = (L(θ + εPz) + L(θ - εPz) - 2·L(θ)) / ε²

    Args:
        eps: distance of the points from θ.
        probes: number of directions; the step is the mean over them.
    """

    def points(self, directions: Sequence[Direction]) -> list[Point]:
        sides = [Point(direction, sign * self.eps) for direction in directions for sign in (1, -1)]
        return [Point(directions[0], 0.0), *sides]

    def coeffs(self, losses: Tensor) -> Tensor:
        slopes = ((losses[1::2] - losses[2::2]) / (2 * self.eps)).float()
        return slopes + 0 * self.curvatures(losses)  # not finite where a curvature is not: such a step moves nothing

    def loss(self, losses: Tensor) -> Tensor:
        return losses[0]

    @property
    def centred(self) -> bool:
        return True

    @property
    def curved(self) -> bool:
        return True

    def curvatures(self, losses: Tensor) -> Tensor:
        return ((losses[1::2] + losses[2::2] - 2 * losses[0]) / self.eps**2).float()

    def losses_of(self, loss: float, coeffs: Sequence[float], centres: Sequence[float]) -> tuple[float, ...]:
        bent = [(loss + self.eps**2 * k / 2, self.eps * c) for c, k in zip(coeffs, centres, strict=True)]
        return (loss, *(middle + sign * change for middle, change in bent for sign in (1, -1)))


@dataclasses.dataclass(frozen=True)
class Replay(Estimator):
    """Measures nothing: takes the coefficients that another run recorded.

    Args:
        records: of consecutive steps.
        measured: the estimator of that run, whose points a run that walks in place visits again.
    """

    records: Sequence[Record]
    measured: Estimator | None = None

    @property
    def probes(self) -> int:
        return len(self.records[0].coeffs)

    def points(self, directions: Sequence[Direction]) -> list[Point]:
        return [] if self.measured is None else self.measured.points(directions)

    def coeffs(self, losses: Tensor) -> Tensor:
        return losses[:0].float()

    def loss(self, losses: Tensor) -> Tensor:
        return losses.new_tensor(math.nan)

    def recall(self, step: int) -> Record:
        index = step - self.records[0].step
        if not 0 <= index < len(self.records) or self.records[index].step != step:
            raise ZeroBlockError(f"the journal has no record of step {step}")
        return self.records[index]
