"""Rules without state: the estimate itself, or its sign."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from ..basis import together
from ..direction import Member
from ..state import State
from .base import RULES, Move, Rule


@RULES.register
@dataclasses.dataclass(frozen=True)
class SGD(Rule):
    """δ = g.  A basis that draws inside its kernels takes this step in one pass and never materialises g."""

    adds_up = True

    def delta(self, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        return g

    def capturable(self, member: Member) -> bool:
        return True

    def update_(self, members: Sequence[Member], state: State, move: Move) -> None:
        places = [(member.local, member.basis) for member in members]
        together.add_(places, move.key, move.alphas, [move.decay(member) for member in members])


@RULES.register
@dataclasses.dataclass(frozen=True)
class Sign(Rule):
    """δ = sign(g): ZO-signSGD."""

    unscaled = True

    def delta(self, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        return g.sign_()
