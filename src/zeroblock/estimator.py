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

import torch
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
        """The points to measure at, given the directions of the probes."""

    @abc.abstractmethod
    def coeffs(self, losses: Tensor) -> Tensor:
        """(points,) losses in fp64 → (probes,) coefficients in fp32."""

    @abc.abstractmethod
    def loss(self, losses: Tensor) -> Tensor:
        """(points,) losses in fp64 → the scalar loss that is reported."""

    @property
    def moving(self) -> int:
        """Number of coefficients of a step that are not 0: all of them by default."""
        return self.probes

    @property
    def curved(self) -> bool:
        """Whether the estimator measures ``curvatures``, which rules may need and records keep in place of centres."""
        return False

    def curvatures(self, losses: Tensor) -> Tensor:
        """(points,) losses in fp64 → (probes,) second derivatives in fp32; (0,), the default, if none are measured."""
        return losses[:0].float()

    def recall(self, step: int) -> Record | None:
        """The record of a step that was measured before; None, the default, asks for a measurement."""
        return None

    def at(self, age: int) -> Estimator:
        """The estimator of a step that comes ``age`` steps after the first one of its turn: itself, by default."""
        return self

    @property
    def anchors(self) -> int:
        """Number of batches in an anchor's objective; 0 if no copy of the block is kept as an anchor for a turn."""
        return 0

    @property
    def anchored(self) -> bool:
        """Whether ``points`` also gets, after the directions from θ, the same ones from the anchor."""
        return False

    @property
    def centred(self) -> bool:
        """Whether a record needs one more number per probe, its centre, to rebuild the losses."""
        return False

    def losses_of(self, loss: float, coeffs: Sequence[float], centres: Sequence[float]) -> tuple[float, ...]:
        """The losses that a record stands for; () if the record does not determine them.

        Args:
            loss: the reported loss.
            coeffs: (probes,).
            centres: (probes,) the mean of each probe's losses minus ``loss``, or the curvatures of an estimator that
                is ``curved``; zeros unless ``centred``.
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
        return slopes + 0 * self.curvatures(losses)  # not finite if a curvature is not: such a step moves nothing

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
class Sided(FiniteDifference):
    """Finite differences on one side or on both, whose coefficients are shaped further.

    Args:
        eps: distance of the points from θ.
        probes: number of directions.
        sides: 1 shares one evaluation at θ, 1 + probes in all; 2 takes central differences, 2·probes in all.
    """

    probes: int = 8
    sides: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sides not in (1, 2):
            raise ZeroBlockError(f"{type(self).__name__}: sides must be 1 or 2, got {self.sides}")

    @property
    def plain(self) -> FiniteDifference:
        """The differences before they are shaped."""
        return (OneSided if self.sides == 1 else TwoSided)(self.eps, self.probes)

    def moved(self, losses: Tensor) -> Tensor:
        """(points,) losses → (probes, sides) the losses at a distance from θ."""
        return losses[2 - self.sides :].view(self.probes, self.sides)

    def points(self, directions: Sequence[Direction]) -> list[Point]:
        return self.plain.points(directions)

    def loss(self, losses: Tensor) -> Tensor:
        return self.plain.loss(losses)


@ESTIMATORS.register
@dataclasses.dataclass(frozen=True)
class Standardized(Sided):
    """Differences of losses in units of their own standard deviation, so that lr is in units of the weights.

        one-sided   c_i = (l_i - l_0) / σ        two-sided   c_i = (l_i⁺ - l_i⁻) / 2σ

    σ is the standard deviation of all losses at a distance from θ; if they are all equal, c = 0.  FZOO
    standardizes one-sided differences, EGGROLL two-sided ones (its fitness is -l).

    Args:
        eps: distance of the points from θ.
        probes: number of directions; the step is the mean over them.
        sides: see :class:`Sided`.
        floor: added to σ², so that differences much smaller than its root are not amplified.
        population: divide the sum of squares by the number of losses n, as both published codes do, and not by n - 1.
    """

    floor: float = 0.0
    population: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.probes * self.sides < 2:
            raise ZeroBlockError("Standardized: one loss has no standard deviation: give probes=2 or more, or sides=2")
        if not (self.floor >= 0 and math.isfinite(self.floor)):
            raise ZeroBlockError(f"Standardized: floor must be finite and not negative, got {self.floor}")

    def coeffs(self, losses: Tensor) -> Tensor:
        variance = self.moved(losses).var(correction=0 if self.population else 1) + self.floor
        scaled = self.plain.coeffs(losses).double() * (self.eps / variance.sqrt())
        return torch.where(variance == 0, 0.0, scaled).float()


@ESTIMATORS.register
@dataclasses.dataclass(frozen=True)
class Greedy(Sided):
    """Chooses the one of several directions that leads to the lowest loss.

    Its coefficient is multiplied by the number of probes and the others are 0, because a step is the mean over the
    probes: δ = c·z along the best direction alone.

    Args:
        eps: distance of the points from θ.
        probes: number of directions to choose from.
        sides: see :class:`Sided`.
        as_published: choose by the losses at θ + εz alone, as MeZO-Greedy does, and not by those of both sides.
    """

    probes: int = 4
    sides: int = 2
    as_published: bool = False
    moving = 1

    def coeffs(self, losses: Tensor) -> Tensor:
        moved = self.moved(losses)
        lowest = moved[:, 0] if self.as_published else moved.amin(1)
        best = torch.arange(self.probes, device=losses.device) == lowest.argmin()
        return torch.where(best, self.plain.coeffs(losses) * self.probes, 0.0)


@ESTIMATORS.register
@dataclasses.dataclass(frozen=True)
class Anchored(FiniteDifference):
    """Central differences minus those at the anchor, with the same noise and the same batch.

        c = (L(θ + εPz) - L(θ - εPz)) / 2ε - (L(θ̃ + εPz) - L(θ̃ - εPz)) / 2ε

    The anchor θ̃ is a copy of the active block from the beginning of the turn.  The first step of a turn measures
    plain central differences there, on the objective that ``step`` gets as ``anchor``, which stands for a large batch.
    The rule ``AnchorSGD`` adds that estimate to every step of the turn.

    Args:
        eps: distance of the points from θ and from θ̃.
        probes: number of directions; the step is the mean over them.
        batches: number of batches that ``zeroblock train`` joins for the objective of an anchor.
    """

    batches: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batches < 1:
            raise ZeroBlockError(f"Anchored: batches must be at least 1, got {self.batches}")

    @property
    def anchors(self) -> int:
        return self.batches

    @property
    def anchored(self) -> bool:
        return True

    def at(self, age: int) -> Estimator:
        return self if age else TwoSided(self.eps, self.probes)

    def points(self, directions: Sequence[Direction]) -> list[Point]:
        return [Point(direction, sign * self.eps) for direction in directions for sign in (1, -1)]

    def coeffs(self, losses: Tensor) -> Tensor:
        here, there = ((losses[0::2] - losses[1::2]) / (2 * self.eps)).chunk(2)
        return (here - there).float()

    def loss(self, losses: Tensor) -> Tensor:
        return losses[: 2 * self.probes].mean()


@dataclasses.dataclass(frozen=True)
class Replay(Estimator):
    """Measures nothing: takes the coefficients that another run recorded.

    Args:
        records: the records of consecutive steps.
        measured: the estimator of that run; its points are visited again if weights are perturbed in place.
    """

    records: Sequence[Record]
    measured: Estimator | None = None

    @property
    def probes(self) -> int:
        return len(self.records[0].coeffs)

    @property
    def anchors(self) -> int:
        return 0 if self.measured is None else self.measured.anchors

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
