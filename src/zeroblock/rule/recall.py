"""Rules that read the records of their block: estimates of earlier steps are drawn again, never stored.

Noise is a function of its address, so an estimate Σₖ share_k·z_k of any earlier step takes a few numbers to keep
and one draw to rebuild.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import ops
from ..direction import Member
from ..errors import ZeroBlockError
from ..ops.weigh import LIMIT
from ..state import State
from .base import RULES, Move, Rule

Entry = tuple[int, int, tuple[float, ...]]
"""A step that a rule remembers: its turn, its number, and the shares of its probes."""


class Recall(Rule):
    """A rule whose ``delta`` finds earlier estimates in ``state["past"]``, (steps, span), the newest first.

    They belong to the same block, each expressed in the basis of this turn; if a basis cannot do that, estimates of
    earlier turns are dropped.  The rule keeps a short tuple of numbers per tensor, which is part of the state dict, so
    it is saved, resumed and replayed.
    """

    @abc.abstractmethod
    def remembered(self, past: tuple[Entry, ...], now: Entry) -> tuple[Entry, ...]:
        """The entries to keep for the next step, the newest first.

        Args:
            past: the entries kept so far.
            now: the step that was just taken.
        """

    def update_(self, members: Sequence[Member], state: State, move: Move) -> None:
        states = [state.of(member) for member in members]  # first: if one cannot be made, nothing has moved
        for member, own in zip(members, states, strict=True):
            self._recall_(member, own, state, move)

    def _recall_(self, member: Member, own: dict[str, Any], state: State, move: Move) -> None:
        """Take a step on one tensor, span by span."""
        name, param, basis = member.name, member.local, member.basis
        own["t"] += 1
        past: tuple[Entry, ...] = own.get("past", ())
        past = tuple(one for one in past if one[0] == state.turn or basis.carries)
        bases = [basis if turn == state.turn else state.basis_of(name, turn) for turn, _, _ in past]
        for span in basis.spans():
            g = basis.combined(param, move.key, move.shares, span)
            earlier = g.new_empty((len(past), *g.shape))
            for row, old, (_, step, shares) in zip(earlier, bases, past, strict=True):
                key = move.key.to(step=step)
                draw = old.elementwise(key)
                if draw is not None and draw.mask is None:
                    ops.fill_(row, draw.at(span.start), shares)  # one pass; every turn's basis has the same estimate
                    continue
                g_old = old.combined(param, key, shares, span)
                row.copy_(g_old if old is basis else basis.transport(g_old, old))
            delta = self.delta(g, {"past": earlier}, own["t"])
            basis.lift_(param, delta, span, -float(move.lr), move.key, move.decay(member))
        own["past"] = self.remembered(past, (state.turn, move.key.step, tuple(map(float, move.shares))))


@RULES.register
@dataclasses.dataclass(frozen=True)
class RecallAdam(Recall):
    """m / (√v + eps), with the moments of the last ``window`` estimates, drawn again at every step (AdaMeZO).

        m = Σᵢ β₁ⁱ g₋ᵢ / Σᵢ β₁ⁱ,  v = Σᵢ β₂ⁱ g₋ᵢ² / Σᵢ β₂ⁱ,  i = 0 … window - 1

    The coefficients are its only state.  While t ≤ window, this is Adam with bias correction.

    Args:
        window: the number of estimates, including this step's; each takes one more draw of the block's noise.
        betas: decay of the first and second moment.
        eps: added to the root.
        as_published: as in the code of AdaMeZO, take plain steps δ = g until t > window + 1, and then
            δ = 100·Σᵢ β₁ⁱ g₋ᵢ / (√(Σᵢ β₂ⁱ g₋ᵢ²) + 1e-5).  (Its paper has m and v of Adam, without bias correction.)
    """

    window: int = 10
    betas: tuple[float, float] = (0.7, 0.9)
    eps: float = 1e-8
    as_published: bool = False
    unscaled = True

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ZeroBlockError(f"RecallAdam: window must be at least 1, got {self.window}")
        if not all(0 <= b < 1 for b in self.betas):
            raise ZeroBlockError(f"RecallAdam: betas must be in [0, 1), got {self.betas}")

    def remembered(self, past: tuple[Entry, ...], now: Entry) -> tuple[Entry, ...]:
        return (now, *past)[: self.window - 1]

    def delta(self, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        if self.as_published and t <= self.window + 1:
            return g
        b1, b2 = self.betas
        m, v = g.clone(), g.square()
        for age, earlier in enumerate(state["past"], start=1):
            m.add_(earlier, alpha=b1**age)
            v.addcmul_(earlier, earlier, value=b2**age)
        if self.as_published:
            return m.mul_(100).div_(v.sqrt_().add_(1e-5))
        first, second = (sum(b**age for age in range(1 + len(state["past"]))) for b in self.betas)
        return m.div_(first).div_(v.div_(second).sqrt_().add_(self.eps))


@RULES.register
@dataclasses.dataclass(frozen=True)
class AnchorSGD(Recall):
    """δ = g + g̃, where g̃ is the anchor's estimate, from the turn's first step; on that step δ = boost·g̃ (SVRG).

    With the estimator ``Anchored``, g is the difference between θ and the anchor on a small batch, and g̃ the estimate
    at the anchor on a large one.

    Args:
        boost: the factor on the anchor's own step: the ratio η₁/η₂ of MeZO-SVRG's two learning rates; lr is η₂.
    """

    boost: float = 1.0
    reset = True

    def __post_init__(self) -> None:
        if not 0 <= self.boost < float("inf"):
            raise ZeroBlockError(f"AnchorSGD: boost must be finite and not negative, got {self.boost}")

    def remembered(self, past: tuple[Entry, ...], now: Entry) -> tuple[Entry, ...]:
        return past or (now,)

    def stride(self, interval: int) -> float:
        """Every step of a turn repeats the anchor's estimate, so that the steps add up instead of walking at random.

        The differences of later steps are small, and the running size of the coefficients includes them: the anchor's
        coefficient is then up to ``interval`` times that size, and clamped to :data:`~zeroblock.ops.weigh.LIMIT` times.
        """
        return max(1.0, (self.boost + interval - 1) / math.sqrt(interval) * min(interval, LIMIT))

    def delta(self, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        return g.add_(state["past"][0]) if len(state["past"]) else g.mul_(self.boost)
