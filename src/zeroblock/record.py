"""One step of a run, in a few numbers."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Record:
    """One step.

    Args:
        step: number of the step, from 0.
        block: index of the active block.
        coeffs: one per probe; a step whose coefficients are not finite moved nothing.
        lr: learning rate it used.
        losses: every measured loss.
        loss: the reported loss.
        curvatures: the second derivative along each direction, fp32, if the estimator measures it.
    """

    step: int
    block: int
    coeffs: tuple[float, ...]
    lr: float
    losses: tuple[float, ...]
    loss: float
    curvatures: tuple[float, ...] = ()

    @property
    def finite(self) -> bool:
        """Whether the step moved the weights."""
        return all(map(math.isfinite, self.coeffs))
