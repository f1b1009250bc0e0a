"""The contract of a step: a plan, an objective that is measured, and the numbers that come of it.

    points ──measure──► losses ──gather──► losses ──shape──► coeffs ──update──► weights ──tell──► record
            (objective)         (ranks)           (estimator)        (rule × basis)       (listener)

The optimizer makes a :class:`Plan`.  A runner (``run/``) carries it out: on the host, on a
stream, or as a captured graph.  Every runner goes through the same stages, in this order,
and is tested to give the same numbers and the same weights as the host.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .closure import Closure, value_of
from .direction import Direction, Member, Point, visit
from .errors import ZeroBlockError
from .estimator import Estimator
from .noise import Key
from .number import Numbers
from .ranks import Team
from .ranks.message import common_unit, mean
from .record import Record
from .rule import Move, Rule
from .state import State
from .turn import Turn, clamped
from .weights import Decays, Weights


class Objective(abc.ABC):
    """A number that a run makes smaller.

    Only ``__call__`` is needed: the other methods are faster ways to the same numbers, and
    say None where there is no such way.  Any function of no arguments is an objective, too
    (see :func:`objective_of`).
    """

    @abc.abstractmethod
    def __call__(self) -> Any:
        """The loss at the weights as they are shown now: a number, or a tensor whose mean it is."""

    @property
    def weight(self) -> tuple[str, float] | None:
        """The unit and the number of things that this is a mean over, say ("tokens", 103.0); None if unknown."""
        return None

    @property
    def model(self) -> nn.Module | None:
        """The model that is measured, where the objective knows that it reads all of its weights; else None."""
        return None

    @property
    def parts(self) -> Sequence[Objective]:
        """The objectives of the micro-batches that this is the mean of; this one alone if there is only one."""
        return (self,)

    @property
    def submits(self) -> bool:
        """Whether ``submit`` or ``stage`` may have something to offer."""
        return False

    def measure(self, points: Sequence[Point]) -> Tensor:
        """(points,) the loss at each point, in fp64; by default one after another."""
        return torch.tensor(visit(points, functools.partial(value_of, self)), dtype=torch.float64)

    def submit(self, points: Sequence[Point]) -> Tensor | None:
        """(points,) the same on the device, without waiting for them; None where the host has to wait."""
        return None

    def stage(self) -> Staged | None:
        """This objective in a form that can be captured with its step; None where it cannot."""
        return None


class Captures(Protocol):
    """Keeps captured steps and replays them."""

    def run(self, plan: Plan, staged: Staged) -> Numbers | None:
        """Take a step without waiting for it; None, and nothing moved, where it cannot be captured."""
        ...


class Call(NamedTuple):
    """The arguments of a layer, with None in place of its hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Tape(Protocol):
    """Follows a forward pass that skips its layers, which are captured one by one; takes what comes before and after.

    Piece 0 comes before the first layer, piece i + 1 is layer i, the last one comes after the layers.
    """

    def enter(self, layer: int, hidden: Tensor, call: Call) -> None:
        """A layer is called."""
        ...

    def leave(self) -> tuple[Tensor, bool]:
        """The hidden states after the layers, and whether they are the rows of several points."""
        ...


class Staging(Protocol):
    """An objective bound to a batch that lies in a buffer on the device."""

    def losses(self, points: Sequence[Point], tape: Tape | None = None) -> Tensor:
        """(points,) the losses; ``tape`` follows the forward pass."""
        ...

    def layers(self) -> contextlib.AbstractContextManager[None]:
        """A context in which ``layer`` may be called."""
        ...

    def layer(self, i: int, hidden: Tensor, call: Call, points: Sequence[Point], parted: bool) -> Tensor:
        """Run one layer.

        Args:
            i: which.
            hidden: (rows, S, width).
            call: its other arguments.
            points: where it is evaluated, if it is active.
            parted: whether there is a row per point already.

        Returns:
            (rows or points, S, width).
        """
        ...


@dataclasses.dataclass(frozen=True)
class Staged:
    """An objective whose batch lies in one buffer, so that a captured step can be replayed on the next batch.

    Args:
        graphs: where its captured steps are kept.
        row: the part of ``shape`` that the layers see.
        shape: objectives of one shape can take each other's batches.
        batch: (n,) int64 on the host.
        bind: the objective on a buffer of n numbers on the device.
        pieces: how many pieces the forward pass has; one if it cannot be cut.
        active: the tensors of a plan's block by the piece that reads them.
        reserve: bytes of device memory that a plan's captured steps compute in, whichever block is active.
        device: where steps run.
        weight: see :class:`Objective`.
    """

    graphs: Captures
    row: tuple[object, ...]
    shape: tuple[object, ...]
    batch: Tensor
    bind: Callable[[Tensor], Staging]
    pieces: int
    active: Callable[[Plan], dict[int, list[Member]]]
    reserve: Callable[[Plan], int]
    device: torch.device
    weight: tuple[str, float] | None = None


class Mean(Objective):
    """The mean of several objectives, one per micro-batch.

    Objectives that are means over the same unit (scored tokens, examples) are weighted by their numbers
    of it, so that micro-batches add up to the batch; otherwise all have equal shares.
    """

    def __init__(self, parts: Sequence[Closure]) -> None:
        self._parts = [objective_of(part) for part in parts]

    @property
    def parts(self) -> Sequence[Objective]:
        return self._parts

    def __call__(self) -> Tensor:
        return self._mean([torch.tensor(value_of(part), dtype=torch.float64) for part in self.parts])

    def measure(self, points: Sequence[Point]) -> Tensor:
        return self._mean([part.measure(points).double() for part in self.parts])

    @property
    def weight(self) -> tuple[str, float] | None:
        known = [part.weight for part in self.parts if part.weight is not None]
        unit = common_unit([unit for unit, _ in known])
        if len(known) < len(self.parts) or unit is None:
            return None
        return unit, sum(amount for _, amount in known)

    @property
    def model(self) -> nn.Module | None:
        models = [part.model for part in self.parts]
        return models[0] if models and all(model is models[0] for model in models) else None

    @property
    def amounts(self) -> list[float]:
        """How much each part counts."""
        alike = self.weight is not None
        return [part.weight[1] if alike and part.weight is not None else 1.0 for part in self.parts]

    def _mean(self, values: list[Tensor]) -> Tensor:
        table = torch.stack(values).reshape(len(values), -1)
        return mean(table, torch.tensor(self.amounts, dtype=torch.float64)).reshape(values[0].shape)


class Called(Objective):
    """A plain closure."""

    def __init__(self, closure: Closure) -> None:
        self.closure = closure

    def __call__(self) -> Any:
        return self.closure()


def objective_of(closure: Closure | Sequence[Closure] | None, alone: bool = True) -> Objective:
    """The objective that ``optimizer.step`` was given: one, a function of no arguments, or a list of either.

    Only a process that is not ``alone`` may have an empty list: other processes have the micro-batches of that step.
    """
    if isinstance(closure, Objective):
        return closure
    if callable(closure):
        return Called(closure)
    if isinstance(closure, (list, tuple)) and (closure or not alone) and all(map(callable, closure)):
        return Mean(closure)
    if closure is None:
        raise ZeroBlockError(
            "step() needs a closure, and gradients (of backward() or accelerator.backward()) are not used: write "
            "optimizer.step(lambda: model(**batch).loss) without a backward pass; Hugging Face's Trainer cannot, take "
            "zb.integrations.ZeroOrderTrainer in its place"
        )
    raise ZeroBlockError(
        "step() needs a closure, a function of no arguments that returns the loss, or a list of them; got "
        f"{type(closure).__name__}"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """One step, decided but not taken.

    Args:
        turn: which step of which turn, on which block.
        lr: learning rate.
        weights: the tensors of every block.
        members: those of the active block.
        estimator: from losses to coefficients.
        rule: from coefficients to a step.
        state: the rule's.
        clip: updates take coefficients clamped to ±clip.
        weight_decay: λ.
        decays: which tensors λ applies to.
        team: the processes that take the step together, where there are several.
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
        """One per probe."""
        paired = not self.rule.state  # moments take enough memory
        keys = (self.key.to(probe=probe) for probe in range(self.estimator.probes))
        return tuple(self.weights.direction(key, self.members, paired) for key in keys)

    @functools.cached_property
    def points(self) -> tuple[Point, ...]:
        """Where the objective is measured."""
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
        """How much this process's losses count among those of all; see :meth:`ranks.Team.amount`."""
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
        )

    @property
    def memory(self) -> tuple[object, ...]:
        """The estimator, clip, the block, and the addresses and numbers that are fixed in a captured step."""
        places = ((member.param.data_ptr(), *member.basis.memory()) for member in self.members)
        return (self.estimator, self.clip, self.turn.block, *places, *self.state.memory(self.members))

    def clocked(self, clock: Tensor) -> Plan:
        """The same plan with its noise addressed by a clock on the device; see :class:`noise.Key`."""
        members = tuple(member._replace(basis=member.basis.clocked(clock)) for member in self.members)
        return dataclasses.replace(self, members=members, clock=clock)

    def prepare(self) -> None:
        """Make the state that outlives the step, before the step runs on the device."""
        if self.rule.state:
            self.state.prepare(self.members, self.rule.factors, self.weights.interval)

    def gather(self, losses: Tensor, objective: Objective) -> Tensor:
        """(points,) the losses of all processes.

        Args:
            losses: (points,) of this process, if it is alone; (micro-batches, points of ``mine``) if there are others.
            objective: whose micro-batches these are.
        """
        if self.team is None:
            return losses
        return self.team.gather(self.points, losses, [part.weight for part in objective.parts], self.turn.step)

    def gather_on_device(self, losses: Tensor, amount: Tensor, live: bool = True) -> Tensor:
        """The same where the losses stay on the device; ``amount`` is (1,) there, see :meth:`ranks.Team.submit`."""
        return losses if self.team is None else self.team.submit(self.points, losses, amount, live)

    def shape(self, losses: Tensor) -> Numbers:
        """From the losses to the coefficients, on whatever device they are."""
        losses = losses.double()
        return Numbers.of(self.estimator.loss(losses), losses, self.estimator.coeffs(losses).float())

    def update(self, coeffs: Sequence[float]) -> None:
        """θ ← θ - lr·Pδ, with coefficients on the host."""
        shares = [c / len(coeffs) for c in clamped(coeffs, self.clip)]
        self.rule.update_(self.members, self.state, Move(self.key, shares, self.lr, self._decay))
        self.state.wind()

    def update_on_device(self, coeffs: Tensor, lr: Tensor, live: Tensor) -> None:
        """The same with coefficients that stay on the device; if one is not finite, nothing moves.

        Args:
            coeffs: (probes,) fp64.
            lr: (1,) fp64.
            live: (1,) zero in a trial run, which moves nothing.
        """
        taken = coeffs.isfinite().all() & (live != 0)
        clipped = coeffs if self.clip is None else coeffs.clamp(-self.clip, self.clip)
        shares = torch.where(taken, clipped / len(coeffs), 0.0)
        self.rule.update_(self.members, self.state, Move(self.key, shares, lr, self._decay, taken))

    def _decay(self, member: Member) -> float:
        decays = self.weight_decay and self.decays(member.name, member.param)
        return 1 - self.lr * self.weight_decay if decays else 1.0

    def record(self, numbers: Numbers) -> Record:
        """The step's record; ``numbers`` are on the host."""
        losses, coeffs = tuple(numbers.losses.tolist()), tuple(numbers.coeffs.tolist())
        return Record(self.turn.step, self.turn.block, coeffs, self.lr, losses, float(numbers.loss))
