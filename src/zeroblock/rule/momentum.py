"""Momentum: an average of the estimates."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from ..errors import ZeroBlockError
from .base import RULES, Rule


@RULES.register
@dataclasses.dataclass(frozen=True)
class Momentum(Rule):
    """m ← β·m + (1 - β)·g, δ = m.

    Args:
        beta: β in [0, 1).
        reset: forget m at the start of every turn; by default it is kept and carried from basis to basis.
    """

    beta: float = 0.9
    reset: bool = False
    state = ("m",)

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ZeroBlockError(f"Momentum: beta must be in [0, 1), got {self.beta}")

    def delta(self, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        return state["m"].mul_(self.beta).add_(g, alpha=1 - self.beta)
