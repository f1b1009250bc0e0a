"""Adam in coordinates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import ops
from ..direction import Member
from ..errors import ZeroBlockError
from ..noise import Draw, Key
from ..state import State
from .base import RULES, Move, Rule


@RULES.register
@dataclasses.dataclass(frozen=True)
class Adam(Rule):
    """m̂ / (√v̂ + eps), with the moments of c·z per coordinate.

    If each coordinate is one weight, a step is one kernel over weights and moments.  The moments of
    16-bit weights are then bf16, rounded stochastically: 4 bytes per weight instead of 8.

    Args:
        betas: decay of the first and second moment.
        eps: added to the root.
        reset: forget both at the start of every turn (MeZO-BCD + Adam), or keep them (MeZO + Adam).
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    reset: bool = True
    state = ("m", "v")
    carried = ("m",)
    unscaled = True

    def __post_init__(self) -> None:
        if not all(0 <= b < 1 for b in self.betas):
            raise ZeroBlockError(f"Adam: betas must be in [0, 1), got {self.betas}")

    def factors(self, t: int) -> tuple[float, float]:
        """The bias corrections 1/(1 - βᵗ) of both moments after t steps; 1 before the first."""
        return (1 / (1 - self.betas[0] ** t), 1 / (1 - self.betas[1] ** t)) if t else (1.0, 1.0)

    def delta(self, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        b1, b2 = self.betas
        m = state["m"].mul_(b1).add_(g, alpha=1 - b1)
        v = state["v"].mul_(b2).addcmul_(g, g, value=1 - b2)
        root = torch.sqrt(v / (1 - b2**t)).add_(self.eps)
        return torch.div(m, root.mul_(1 - b1**t), out=g)

    def capturable(self, member: Member) -> bool:
        return self.reset and self._draw(member, Key(0, 0)) is not None

    def dtype(self, member: Member) -> torch.dtype:
        fused = self._draw(member, Key(0, 0)) is not None
        return torch.bfloat16 if fused and member.param.dtype.itemsize == 2 else torch.float32

    def update_(self, members: Sequence[Member], state: State, move: Move) -> None:
        scalars: Sequence[float] | Tensor
        factors = None if move.taken is None else state.tick(move.taken)
        known: dict[float, Tensor] = {}  # on the device, by scale; usually there is one scale
        states = [state.of(member) for member in members]
        for member, own in zip(members, states, strict=True):
            draw = self._draw(member, move.key)
            if draw is None:
                self._update_(member, own, move)
                continue
            scale = member.basis.scale
            if factors is None:
                own["t"] += 1
                scalars = (1.0, -float(move.lr) * scale, *self.factors(own["t"]), *move.shares)
            else:
                scalars = known[scale] = known[scale] if scale in known else move.numbers(scale, factors)
            ops.adam_(
                member.local, own["m"], own["v"], draw, scalars, betas=self.betas, eps=self.eps,
                decay=move.decay(member), rounding=member.basis.rounding,
            )  # fmt: skip

    @staticmethod
    def _draw(member: Member, key: Key) -> Draw | None:
        """The noise of a tensor that the fused kernel can take a step on; None for others."""
        return None if member.param.dtype == torch.float64 else member.basis.elementwise(key)
