"""A diagonal of the Hessian, measured by second differences, scales directions and steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from ..basis import Shaped
from ..direction import Member
from ..errors import ZeroBlockError
from ..state import State
from .base import RULES, Move, Rule


@RULES.register
@dataclasses.dataclass(frozen=True)
class Hessian(Rule):
    """Directions z/√h, δ = g/√h of the noise's estimate g, and h ← (1 - α)·h + α·|½κ|·h·z², from h = 1 (HiZOO).

    κ is the second derivative along the direction, so that h follows the diagonal of the Hessian and z/√h has
    its inverse for a covariance.  With several probes, κ·z² is the mean over them.  The state is h - 1 in fp32: at
    α = 1e-8 h itself would not change in fp32.  The rule needs ``estimator=Curvature(...)``.

    Args:
        alpha: α in [0, 1], the weight of a new measurement.
        reset: start from h = 1 again at the start of every turn, so that only one block has a state.
        as_published: follow HiZOO's code: directions √σ·z, δ = √σ·g, and σ ← (1 - α)·σ + α·|½κ|·z²/σ.  There σ
            scales the directions as the inverse of the Hessian should, but follows the Hessian itself.
    """

    alpha: float = 1e-8
    reset: bool = False
    as_published: bool = False
    state = ("h",)
    divisible = False  # a gathered tensor would need the curvature of all parts
    carried = ()

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ZeroBlockError(f"Hessian: alpha must be in [0, 1], got {self.alpha}")

    def delta(self, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        return self._scaled(g, state["h"])

    def shaped(self, members: Sequence[Member], state: State) -> Sequence[Member]:
        return [self._shaped(member, state.known(member)) for member in members]

    def update_(self, members: Sequence[Member], state: State, move: Move) -> None:
        if not move.curvatures:
            raise ZeroBlockError("the rule Hessian needs second differences: give estimator=zb.Curvature(eps)")
        states = [state.of(member) for member in members]
        for member, own in zip(members, states, strict=True):
            own["t"] += 1
            for span in member.basis.spans():
                self._advance_(member, own, span, move)

    def _shaped(self, member: Member, own: dict[str, Tensor]) -> Member:
        if not own:
            return member

        def shape(z: Tensor, span: slice) -> Tensor:
            return self._scaled(z, own["h"][span])

        return member._replace(basis=Shaped(member.basis, shape))

    def _scaled(self, z: Tensor, excess: Tensor) -> Tensor:
        """z/√h, or √σ·z."""
        root = (1 + excess).sqrt_()
        return z.mul_(root) if self.as_published else z.div_(root)

    def _advance_(self, member: Member, own: dict[str, Tensor], span: slice, move: Move) -> None:
        """Take the step of one span: h first, then the weights."""
        param, basis = member.local, member.basis
        g: Tensor | float = 0.0
        bend: Tensor | float = 0.0
        for probe, (share, curvature) in enumerate(zip(move.shares, move.curvatures, strict=True)):
            z = basis.coords(param, move.key.to(probe=move.key.probe + probe), span)
            bend = (z * z).mul_(curvature / (2 * len(move.curvatures))).add_(bend)
            g = z.mul_(share).add_(g)
        assert isinstance(g, Tensor)
        assert isinstance(bend, Tensor)
        excess, bend = own["h"][span], bend.abs_()
        h = 1 + excess
        change = bend.div_(h).sub_(h) if self.as_published else bend.sub_(1).mul_(h)
        excess.add_(change, alpha=self.alpha)
        basis.lift_(param, self._scaled(g, excess), span, -float(move.lr), move.key, move.decay(member))
