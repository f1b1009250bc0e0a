"""Rules: from an estimate c·z in coordinates to a step δ in coordinates.

    θ ← (1 - lr·λ)·θ - lr·Pδ

State lives in coordinates, so a block's state is block-sized and a low-rank
one's m×r.  It is flat and handed to the rule span by span.

A new rule needs ``delta``.  A rule that can do better than materialising c·z span by
span (SGD, Adam) overrides ``update_``, and says in ``capturable`` whether its update can
take coefficients that never leave the device.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import ops
from .direction import Member
from .errors import ZeroBlockError
from .noise import Draw, Key
from .ops.shared.branch import beside
from .registry import Registry
from .state import State

RULES = Registry("rule")


@dataclasses.dataclass(frozen=True)
class Move:
    """How far a step goes along each of its directions: on the host plain numbers, on the device tensors.

    Args:
        key: addresses the noise of the step's first probe.
        shares: (probes,) clamped coefficients divided by their number, fp64.
        lr: learning rate; on the device (1,) in fp64.
        decay: the factor on a tensor's weights, 1 - lr·λ.
        taken: on the device (1,), false where the step must change nothing; None on the host.
    """

    key: Key
    shares: Sequence[float] | Tensor
    lr: float | Tensor
    decay: Callable[[Member], float]
    taken: Tensor | None = None

    @property
    def alphas(self) -> Sequence[float] | Tensor:
        """-lr·share per probe; on the device in fp32."""
        if isinstance(self.shares, Tensor):
            return (-self.lr * self.shares).float()
        return [-float(self.lr) * share for share in self.shares]


class Rule(abc.ABC):
    """How an estimate becomes a step."""

    state: tuple[str, ...] = ()
    """Names of the tensors that the rule keeps per tensor of weights, with as many elements as coordinates."""
    reset = False
    """Whether these are dropped at the start of every turn."""
    adds_up = False
    """Whether δ = g, so that a weight's steps are a sum and can be replayed together."""

    @property
    def carried(self) -> tuple[str, ...]:
        """Names of the tensors that are linear in the estimates and so follow the basis from turn to turn."""
        return self.state

    @abc.abstractmethod
    def delta(self, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        """δ from the estimate, on a span.

        Args:
            g: (span,) Σₖ share_k·z_k in fp32; may be overwritten.
            state: the rule's tensors on the same span, to be updated in place.
            t: which step this is since the state was zero, counting from 1.

        Returns:
            (span,) in fp32.
        """

    def capturable(self, member: Member) -> bool:
        """Whether ``update_`` of this tensor can take a move that stays on the device; a rule with state must reset."""
        return False

    def factors(self, t: int) -> tuple[float, ...]:
        """Numbers that depend on the count of steps alone, which an update on the device looks up."""
        return ()

    def dtype(self, member: Member) -> torch.dtype:
        """The dtype of this rule's state for a tensor."""
        return torch.float32

    def update_(self, members: Sequence[Member], state: State, move: Move) -> None:
        """Take a step on every tensor of a block."""
        states = [state.of(member) for member in members]  # first: where one cannot be made, nothing has moved
        for member, own in zip(members, states, strict=True):
            self._update_(member, own, move)

    def _update_(self, member: Member, state: dict, move: Move) -> None:
        """Take a step on one tensor, span by span."""
        _, param, basis = member
        state["t"] += 1
        decay = move.decay(member)
        for span in basis.spans():
            g = basis.combined(param, move.key, move.shares, span)
            delta = self.delta(g, {name: state[name][span] for name in self.state}, state["t"])
            basis.lift_(param, delta, span, -float(move.lr), move.key, decay)


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
        alphas = move.alphas
        for member in beside(members, sum(member.param.nbytes for member in members)):
            member.basis.add_(member.param, move.key, alphas, move.decay(member))


@RULES.register
@dataclasses.dataclass(frozen=True)
class Sign(Rule):
    """δ = sign(g): ZO-signSGD."""

    def delta(self, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        return g.sign_()


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


@RULES.register
@dataclasses.dataclass(frozen=True)
class Adam(Rule):
    """m̂ / (√v̂ + eps), with the moments of c·z per coordinate.

    Where coordinates are weights one by one, a step is one kernel over weights and moments.  The
    moments of 16-bit weights are bf16 there, rounded stochastically: 4 bytes per weight instead of 8.

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
        if move.taken is not None:
            assert isinstance(move.lr, Tensor)
            assert isinstance(move.shares, Tensor)
            scalars = torch.cat([move.taken.double(), -move.lr, state.tick(move.taken), move.shares]).float()
        states = [state.of(member) for member in members]
        for member, own in zip(members, states, strict=True):
            draw = self._draw(member, move.key)
            if draw is None:
                self._update_(member, own, move)
                continue
            if move.taken is None:
                own["t"] += 1
                scalars = (1.0, -float(move.lr), *self.factors(own["t"]), *move.shares)
            ops.adam_(
                member.param, own["m"], own["v"], draw, scalars, betas=self.betas, eps=self.eps,
                decay=move.decay(member), rounding=member.basis.rounding,
            )  # fmt: skip

    @staticmethod
    def _draw(member: Member, key: Key) -> Draw | None:
        """The noise of a tensor that the fused kernel can take a step on; None for others."""
        return None if member.param.dtype == torch.float64 else member.basis.elementwise(key)
