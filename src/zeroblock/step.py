"""The contract of a step: a plan, an objective that is measured, and the resulting numbers.

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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .closure import Closure, value_of
from .direction import Member, Point, visit
from .errors import ZeroBlockError
from .number import Numbers
from .plan import Plan
from .ranks.message import common_unit, mean


class Objective(abc.ABC):
    """A number that a run makes smaller.

    Only ``__call__`` is needed: the other methods are faster ways to the same numbers, and
    return None if there is no such way.  Any function of no arguments is an objective, too
    (see :func:`objective_of`).
    """

    @abc.abstractmethod
    def __call__(self) -> Any:
        """The loss at the weights that the model currently shows: a number, or a tensor whose mean it is."""

    @property
    def weight(self) -> tuple[str, float] | None:
        """The unit and the number of things that this is a mean over, such as ("tokens", 103.0); None if unknown."""
        return None

    @property
    def model(self) -> nn.Module | None:
        """The measured model, if the objective knows that it reads all of its weights; otherwise None."""
        return None

    @property
    def parts(self) -> Sequence[Objective]:
        """The objectives of the micro-batches that this is the mean of; this one alone if there is only one."""
        return (self,)

    @property
    def submits(self) -> bool:
        """Whether ``submit`` or ``stage`` may return something other than None."""
        return False

    def measure(self, points: Sequence[Point]) -> Tensor:
        """(points,) the loss at each point, in fp64; by default one after another."""
        return torch.tensor(visit(points, functools.partial(value_of, self)), dtype=torch.float64)

    def submit(self, points: Sequence[Point]) -> Tensor | None:
        """(points,) the losses on the device, without waiting for them; None if the host has to wait."""
        return None

    def stage(self) -> Staged | None:
        """This objective in a form that can be captured with its step; None if it has none."""
        return None


class Captures(Protocol):
    """Keeps captured steps and replays them."""

    def run(self, plan: Plan, staged: Staged) -> Numbers | None:
        """Take a step without waiting for it; return None and move nothing if it cannot be captured."""
        ...


class Call(NamedTuple):
    """The arguments of a layer, with None in place of its hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Tape(Protocol):
    """Follows a forward pass that skips its layers, which are captured one by one; handles what comes before and after.

    Piece 0 comes before the first layer, piece i + 1 is layer i, the last one comes after the layers.
    """

    def enter(self, layer: int, hidden: Tensor, call: Call) -> None:
        """Called when the pass reaches a layer."""
        ...

    def leave(self) -> tuple[Tensor, bool]:
        """Return the hidden states after the layers, and whether they are the rows of several points."""
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
            i: index of the layer.
            hidden: (rows, S, width).
            call: the layer's other arguments.
            points: the points at which it is evaluated, if it is active.
            parted: whether there is a row per point already.

        Returns:
            (rows or points, S, width).
        """
        ...


@dataclasses.dataclass(frozen=True)
class Staged:
    """An objective whose batch lies in one buffer, so that a captured step can be replayed on the next batch.

    Args:
        graphs: keeps its captured steps.
        row: the part of ``shape`` that the layers see.
        shape: objectives of one shape can take each other's batches.
        batch: (n,) int64 on the host.
        bind: binds the objective to a buffer of n numbers on the device.
        pieces: number of pieces of the forward pass; one if it cannot be cut.
        active: gives the tensors of a plan's block, by the piece that reads them.
        reserve: gives the bytes of device memory that a plan's captured steps compute in, whichever block is active.
        device: the device that steps run on.
        most: maximum number of points in a captured pass.
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
    most: int
    weight: tuple[str, float] | None = None


class Mean(Objective):
    """The mean of several objectives, one per micro-batch.

    Objectives that are means over the same unit (scored tokens, examples) are weighted by the
    number of units, so that micro-batches add up to the batch; otherwise all have equal shares.
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
        """The weight of each part in the mean."""
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
    """The objective for the closure of ``optimizer.step``: one itself, a function of no arguments, or a list of either.

    Only a process that is not ``alone`` may pass an empty list: other processes have the micro-batches of that step.
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
            "optimizer.step(lambda: model(**batch).loss) without a backward pass; Hugging Face's Trainer cannot, so "
            "use zb.integrations.ZeroOrderTrainer instead"
        )
    raise ZeroBlockError(
        "step() needs a closure, a function of no arguments that returns the loss, or a list of them; got "
        f"{type(closure).__name__}"
    )
