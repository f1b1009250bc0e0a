"""One statement of the paper, its measurement, and whether it holds."""

from __future__ import annotations

import dataclasses
import enum
import math

from torch import Tensor


class Role(enum.StrEnum):
    """The place of a checked line in the paper."""

    CLAIM = "claim"
    """The statement itself, or a consequence that must hold if the statement does."""
    STEP = "step"
    """A line of a proof: when it fails, the claim may still be true."""
    OURS = "ours"
    """A replacement that we propose; the paper does not say it."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One line, stated and measured.

    Args:
        number: the statement's number in the paper, for example "B.4"; a step of a proof has the number of the
            statement that it proves.
        label: a few words, for a figure.
        statement: the line in words and symbols.
        stated: the value or bound that the line gives.
        relation: "=" or "≤", which must hold between the measured and the stated value.
        measured: the simulated value, or the exact one if ``error`` is 0.
        error: the standard error of ``measured``.
        truth: a value that does hold in place of ``stated``; NaN if ``stated`` holds.
        role: see :class:`Role`.
        reading: the fair reading under which the line was tested.
    """

    number: str
    label: str
    statement: str
    stated: float
    relation: str
    measured: float
    error: float = 0.0
    truth: float = math.nan
    role: Role = Role.CLAIM
    reading: str = ""

    @property
    def holds(self) -> bool:
        """Whether the relation holds within four standard errors and rounding."""
        slack = 4 * self.error + 1e-9 * abs(self.stated)
        difference = self.measured - self.stated
        return abs(difference) <= slack if self.relation == "=" else difference <= slack

    @property
    def ratio(self) -> float:
        """Measured over stated."""
        return self.measured / self.stated


def mean_of(values: Tensor) -> tuple[float, float]:
    """Mean and standard error of samples."""
    return float(values.mean()), float(values.std() / math.sqrt(values.numel()))
