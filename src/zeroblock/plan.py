"""The plan of a step: decided by the optimizer, carried out by a runner."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from .direction import Direction, Member, Point
from .estimator import Estimator
from .noise import Key
from .number import Numbers
from .ranks import Team
from .record import Record
from .rule import Move, Rule
from .state import State
from .turn import Turn, clamped
from .weights import Decays, Weights


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """One step, decided but not taken.

    Args:
        turn: the step, its turn and its blocks.
        lr: learning rate.
        weights: the tensors of every block.
        members: the tensors of the active blocks, block after block.
        estimator: turns losses into coefficients.
        rule: turns coefficients into a step.
        state: the rule's state.
        clip: updates use coefficients clamped to ±clip.
        weight_decay: λ.
        decays: which tensors λ applies to.
        team: the processes that take the step together, if there are several.
        clock: (2,) int64 on the device: the step and the first step of its turn, which captured kernels read there.
    """

    turn: Turn
    lr: float
    weights: Weights
    members: tuple[Member, ...]
    estimator: Estimator
    rule: Rule
    state: State
    clip: float | None
    weight_decay: float
    decays: Decays
    team: Team | None = None
    clock: Tensor | None = None

    @functools.cached_property
    def directions(self) -> tuple[Direction, ...]:
        """One direction per probe from θ and, if the estimator needs them, from the anchor."""
        paired = not self.rule.state and self.weights.shelf.pairs  # moments take enough memory
        several = bool(self.turn.others)
        keys = [self.key.to(probe=probe) for probe in range(self.estimator.probes)]
        shaped = self.rule.shaped(self.members, self.state)
        origins = (shaped, self.weights.anchored(shaped)) if self.estimator.anchored else (shaped,)
        return tuple(self.weights.direction(key, members, paired, several) for members in origins for key in keys)

    @functools.cached_property
    def points(self) -> tuple[Point, ...]:
        """The points at which the objective is measured."""
        return tuple(self.estimator.points(self.directions))

    @functools.cached_property
    def mine(self) -> tuple[tuple[Point, ...], ...]:
        """The points that this process measures, in the groups that are measured together."""
        groups = (range(len(self.points)),) if self.team is None else self.team.mine(self.points)
        return tuple(tuple(self.points[i] for i in group) for group in groups)

    @property
    def measured(self) -> tuple[Point, ...]:
        """The points that this process measures; on a GPU all of them together."""
        return tuple(itertools.chain.from_iterable(self.mine))

    def amount(self, weight: tuple[str, float] | None) -> float:
        """The amount of this process's losses in the mean over all processes; see :meth:`ranks.Team.amount`."""
        return 1.0 if self.team is None else self.team.amount(weight)

    @property
    def key(self) -> Key:
        """The address of this step's noise."""
        return Key(self.weights.seed, self.turn.step, clock=self.clock)

    @functools.cached_property
    def capturable(self) -> bool:
        """Whether the step needs no number on the host: then it can be submitted, and captured as a graph."""
        return (
            all(self.rule.capturable(member) and member.basis.capturable for member in self.members)
            and (not self.rule.state or self.rule.reset)  # the device counts the steps of one turn
            and self.weights.restore == "copy"
            and not self.weight_decay
            and self.weights.capturable
            and all(factor == 1 for _, factor in self.turn.others)  # a captured step has one learning rate
        )

    @property
    def memory(self) -> tuple[object, ...]:
        """The estimator, clip, the block, and the addresses and numbers that are fixed in a captured step."""
        places = ((member.param.data_ptr(), *member.basis.memory()) for member in self.members)
        return (self.estimator, self.clip, self.turn.block, self.turn.others, *places, *self.state.memory(self.members))

    def clocked(self, clock: Tensor) -> Plan:
        """The same plan with its noise addressed by a clock on the device; see :class:`noise.Key`."""
        members = tuple(member._replace(basis=member.basis.clocked(clock)) for member in self.members)
        return dataclasses.replace(self, members=members, clock=clock)

    def prepare(self) -> None:
        """Allocate the state that outlives the step, before the step runs on the device."""
        self.state.prepare(self.members, self.rule.factors, self.weights.interval)

    def gather(self, losses: Tensor, weights: Sequence[tuple[str, float] | None]) -> Tensor:
        """(points,) the losses of all processes.

        Args:
            losses: (points,) of this process, if it is alone; (micro-batches, points of ``mine``) if there are others.
            weights: the weights of the micro-batches' objectives.
        """
        if self.team is None:
            return losses
        return self.team.gather(self.points, losses, weights, self.turn.step)

    def gather_on_device(self, losses: Tensor, amount: Tensor, live: bool = True) -> Tensor:
        """The same for losses that stay on the device; ``amount`` is (1,) there, see :meth:`ranks.Team.submit`."""
        return losses if self.team is None else self.team.submit(self.points, losses, amount, live)

    def shape(self, losses: Tensor, out: Tensor | None = None) -> Numbers:
        """Turn losses into coefficients, on whatever device they are; ``out`` is the buffer for the numbers."""
        losses = losses.double()
        return Numbers.of(self.estimator.loss(losses), losses, self.estimator.coeffs(losses).float(), out)

    def update(self, coeffs: Sequence[float], curvatures: Sequence[float] = ()) -> None:
        """θ ← θ - lr·Pδ, with coefficients (and curvatures, if they are measured) on the host."""
        self.weights.release()
        shares = [c / len(coeffs) for c in self.weighed(coeffs, self.turn.block)]
        moved = self.rule.moved(self.members, self.state)
        for factor, members in self.weights.grouped(moved, self.turn.active):
            lr = self.lr * factor
            move = Move(self.key, shares, lr, functools.partial(self._decay, lr), curvatures=curvatures)
            for part in self.weights.shelf.visits(members):
                self.rule.update_(part, self.state, move)
        self.state.wind()

    def weighed(self, coeffs: Sequence[float], block: int) -> tuple[float, ...]:
        """The coefficients that a step on a block uses in place of the measured ones, which the rule remembers."""
        return tuple(self.state.weigh(self.rule, clamped(coeffs, self.clip), block))

    def update_on_device(self, coeffs: Tensor, lr: Tensor, live: Tensor) -> None:
        """Like ``update``, with coefficients that stay on the device; if one is not finite, nothing moves.

        Args:
            coeffs: (probes,) fp64.
            lr: (1,) fp64.
            live: (1,) zero in a trial run, which moves nothing.
        """
        taken = (0 * coeffs < live).all(0, keepdim=True)  # finite and live; ``isfinite`` alone is four kernels
        clipped = coeffs if self.clip is None else coeffs.clamp(-self.clip, self.clip)
        weighed = self.rule.weigh_on_device(clipped, taken, self.state.table, self.turn.block)
        shares = torch.where(taken, _divided(weighed, len(coeffs)), 0.0)
        decay = functools.partial(self._decay, self.lr)
        self.rule.update_(self.members, self.state, Move(self.key, shares, lr, decay, taken))

    def _decay(self, lr: float, member: Member) -> float:
        decays = self.weight_decay and self.decays(member.name, member.param)
        return 1 - lr * self.weight_decay if decays else 1.0

    def record(self, numbers: Numbers) -> Record:
        """The step's record; ``numbers`` are on the host."""
        loss, *rest = numbers.flat.tolist()
        losses, coeffs = tuple(rest[: numbers.points]), tuple(rest[numbers.points :])
        known = self.estimator.recall(self.turn.step)
        curvatures = known.curvatures if known else tuple(self.estimator.curvatures(numbers.losses).tolist())
        return Record(self.turn.step, self.turn.block, coeffs, self.lr, losses, loss, curvatures)


def _divided(x: Tensor, count: int) -> Tensor:
    """x / count to the bit: on a GPU torch multiplies by 1 / count, which is exact only for powers of two."""
    if count == 1:
        return x
    return x / (x.new_full((), count) if count & (count - 1) else count)
