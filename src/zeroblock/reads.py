"""Note which weights an objective reads while it is measured."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .direction import METADATA, Direction, Member, Mode, Point
from .errors import ZeroBlockError, ZeroBlockWarning
from .interrupt import uninterrupted
from .step import Mean, Objective

BACKWARD = (
    "the closure runs backward(), which a zeroth-order step never needs: return the loss and leave backward() and "
    "zero_grad() out; in Lightning set self.automatic_optimization = False and call optimizer.step(closure) in "
    "training_step; for gradients of inputs use torch.autograd.grad"
)
SHOWING = {Tensor.data.__get__, Tensor.data.__set__}  # type: ignore[attr-defined]
"""Functions by which a direction shows and hides copies of the weights."""


class Reading(Mode):
    """Notes which weights torch functions read while it is active, in the thread that entered it.

    Compiled and scripted code reads weights without any torch function, and so do other threads.

    Args:
        params: the trainable weights.
        members: the tensors of the active block.
        directions: the directions along which the block is perturbed.
    """

    def __init__(self, params: Iterable[Tensor], members: Sequence[Member], directions: Sequence[Direction]) -> None:
        super().__init__()
        self.directions = directions
        self.called = False
        """Whether any torch function was called."""
        self.traced = False
        """Whether compiled code ran, whose reads cannot be seen."""
        self._params, self._active = {id(p) for p in params}, {id(m.param) for m in members}
        self._homes = {id(m.param): m.param.data_ptr() for m in members if m.basis.factor_shape is None}
        """Addresses of the weights themselves, for tensors that are perturbed as copies."""
        self._read: set[int] = set()
        self._alone = False
        """Whether only the closure runs, and no code that perturbs weights."""

    @property
    def block(self) -> bool:
        """Whether a weight of the active block was read."""
        return not self._read.isdisjoint(self._active) or any(direction.read for direction in self.directions)

    @property
    def any(self) -> bool:
        """Whether a trainable weight was read."""
        return bool(self._read) or self.block

    def run(self, closure: Callable[[], Any]) -> Any:
        """Run a closure, and attribute every call of a torch function to it."""
        self._alone = True
        with uninterrupted() as shield, self, shield.opened():
            value = closure()
        if isinstance(value, Tensor) and value.grad_fn is not None:
            warnings.warn(
                "the loss that the closure returned keeps the memory that backpropagation would need: either it was "
                "computed outside the closure, where it cannot follow the weights (compute it inside), or the closure "
                "turns gradients on (leave torch.enable_grad() and torch.set_grad_enabled(True) out of it)",
                ZeroBlockWarning,
                stacklevel=2,
            )
        return value

    def measure(self, measure: Callable[..., Any], *args: Any) -> Any:
        """Run a measurement that perturbs weights itself."""
        self._alone = False
        with uninterrupted() as shield, self, shield.opened():
            return measure(*args)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # the compiler traces this branch only
            self.traced = True
        else:
            self._note(func, (*args, *kwargs.values()))
        return func(*args, **kwargs)

    def _note(self, func: Callable[..., Any], values: Iterable[Any]) -> None:
        if func is Tensor.backward:
            raise ZeroBlockError(BACKWARD)
        if func in METADATA:
            return
        self.called = True
        for value in values:
            if isinstance(value, Tensor):
                if id(value) in self._params and (self._alone or self._shown(func, value)):
                    self._read.add(id(value))
            elif isinstance(value, (list, tuple)):
                self._note(func, value)

    def _shown(self, func: Callable[..., Any], param: Tensor) -> bool:
        """Whether a tensor shows the weights of a point, so that the model reads it and not the code that perturbs."""
        return func not in SHOWING and param.data_ptr() != self._homes.get(id(param))


class Watched(Objective):
    """An objective whose reads of the weights are noted.

    Args:
        inner: the objective.
        reading: takes the notes.
    """

    def __init__(self, inner: Objective, reading: Reading) -> None:
        self.inner, self.reading = inner, reading

    def __call__(self) -> Any:
        return self.reading.run(self.inner)

    @property
    def weight(self) -> tuple[str, float] | None:
        return self.inner.weight

    @property
    def submits(self) -> bool:
        return self.inner.submits

    def measure(self, points: Sequence[Point]) -> Tensor:
        if type(self.inner).measure is Objective.measure:  # point by point, so that only the objective is noted
            return super().measure(points)
        return cast(Tensor, self.reading.measure(self.inner.measure, points))

    def submit(self, points: Sequence[Point]) -> Tensor | None:
        return cast("Tensor | None", self.reading.measure(self.inner.submit, points))


def watched(objective: Objective, reading: Reading) -> Objective:
    """The same objective, with the weights that it reads noted."""
    if isinstance(objective, Mean):
        return Mean([watched(part, reading) for part in objective.parts])
    return Watched(objective, reading)
