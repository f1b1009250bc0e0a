"""Rules: from an estimate c·z in coordinates to a step δ in coordinates.

    θ ← (1 - lr·λ)·θ - lr·Pδ

State lives in coordinates, so a block's state has the size of the block, and m×r
in a low-rank subspace.  It is flat, and the rule sees it span by span.

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

from ..direction import Member
from ..noise import Key
from ..registry import Registry
from ..state import State

RULES = Registry("rule")


@dataclasses.dataclass(frozen=True)
class Move:
    """How far a step goes along each of its directions: plain numbers on the host, tensors on the device.

    Args:
        key: addresses the noise of the step's first probe.
        shares: (probes,) clamped coefficients divided by their number, fp64.
        lr: learning rate; on the device (1,) in fp64.
        decay: the factor on a tensor's weights, 1 - lr·λ.
        taken: on the device (1,), false if the step must change nothing; None on the host.
        curvatures: (probes,) second derivatives along the directions, if the estimator measures them.
    """

    key: Key
    shares: Sequence[float] | Tensor
    lr: float | Tensor
    decay: Callable[[Member], float]
    taken: Tensor | None = None
    curvatures: Sequence[float] = ()

    @property
    def alphas(self) -> Sequence[float] | Tensor:
        """-lr·share per probe; on the device in fp32."""
        if isinstance(self.shares, Tensor):
            return (-self.lr * self.shares).float()
        return [-float(self.lr) * share for share in self.shares]

    def numbers(self, scale: float, factors: Tensor) -> Tensor:
        """(2 + factors + probes,) fp32 on the device: taken, -lr·scale, the factors and the shares."""
        assert self.taken is not None
        assert isinstance(self.lr, Tensor)
        assert isinstance(self.shares, Tensor)
        return torch.cat([self.taken.double(), -self.lr * scale, factors, self.shares]).float()


class Rule(abc.ABC):
    """How an estimate becomes a step."""

    state: tuple[str, ...] = ()
    """Names of the tensors that the rule keeps per tensor of weights, with as many elements as coordinates."""
    reset = False
    """Whether the rule drops these tensors at the start of every turn."""
    adds_up = False
    """Whether δ = g, so that a weight's steps are a sum and can be replayed together."""
    unscaled = False
    """Whether δ stays the same when all coefficients are multiplied by one positive factor."""
    divisible = True
    """Whether a process can move its part of a tensor without knowing the others."""
    block_numbers = 0
    """The number of values that the rule keeps per block, and once more for all blocks together."""

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
            t: the number of this step since the state was zero, counting from 1.

        Returns:
            (span,) in fp32.
        """

    def stride(self, interval: int) -> float:
        """The factor by which a turn may lead further than ``interval`` steps of lr in random directions."""
        return 1.0

    def shaped(self, members: Sequence[Member], state: State) -> Sequence[Member]:
        """The tensors with the bases in which a step is measured; a rule may let its state shape the directions."""
        return members

    def moved(self, members: Sequence[Member], state: State) -> Sequence[Member]:
        """The tensors as ``update_`` takes them; called once per step, before the tensors are split by block."""
        return members

    def weigh(self, coeffs: Sequence[float], table: list[list[float]], block: int) -> Sequence[float]:
        """The coefficients that a step uses in place of the measured ones; by default the same.

        Args:
            coeffs: (probes,) clamped to ±clip, finite.
            table: (blocks + 1, block_numbers) the numbers of every block and, last, of all together; updated in place.
            block: index of the active block.
        """
        return coeffs

    def weigh_on_device(self, coeffs: Tensor, taken: Tensor, table: Tensor, block: int) -> Tensor:
        """``weigh``, to the bit, with numbers that stay on the device, in fp64; see :meth:`Plan.update_on_device`."""
        return coeffs

    def capturable(self, member: Member) -> bool:
        """Whether ``update_`` of this tensor can take a move that stays on the device; state needs ``reset``."""
        return False

    def factors(self, t: int) -> tuple[float, ...]:
        """Numbers that depend on the count of steps alone, which an update on the device looks up."""
        return ()

    def dtype(self, member: Member) -> torch.dtype:
        """The dtype of this rule's state for a tensor."""
        return torch.float32

    def update_(self, members: Sequence[Member], state: State, move: Move) -> None:
        """Take a step on every tensor of a block."""
        states = [state.of(member) for member in members]  # first: if one cannot be made, nothing has moved
        for member, own in zip(members, states, strict=True):
            self._update_(member, own, move)

    def _update_(self, member: Member, state: dict, move: Move) -> None:
        """Take a step on one tensor, span by span."""
        param, basis = member.local, member.basis
        state["t"] += 1
        decay = move.decay(member)
        for span in basis.spans():
            g = basis.combined(param, move.key, move.shares, span)
            delta = self.delta(g, {name: state[name][span] for name in self.state}, state["t"])
            basis.lift_(param, delta, span, -float(move.lr), move.key, decay)
