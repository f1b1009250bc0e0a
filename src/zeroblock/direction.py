"""Directions: a line through the weights, and four ways to measure at points on it.

MeZO adds εu to every weight, subtracts it twice and adds it again; in 16 bits
the weights do not come back.  Here θ is by default not written while measuring
(only shards are, and restored from a copy): the perturbed weights are copies,
and only the part being evaluated has one.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .basis import Basis, together
from .errors import ZeroBlockError
from .interrupt import uninterrupted
from .noise import Key
from .shard import local

UNREAD_FIX = (
    "call the very model that the optimizer was built on, and not a copy of it (deepcopy, export, another instance), "
    "and compute the loss anew in every call of the closure"
)
UNREAD = f"the objective read none of the model's weights where they could be perturbed: {UNREAD_FIX}"
"""The error of an objective that no step can change."""


class Member(NamedTuple):
    """A tensor of the active block and its basis in this turn."""

    name: str
    param: Tensor
    basis: Basis

    def perturbed(self, param: Tensor, key: Key, scale: float) -> Tensor:
        """The tensor at θ + scale·Pz: a copy, or ``param`` itself if it is already there."""
        return self.basis.perturbed(param, key, scale) if scale or self.basis.behind else param

    @property
    def local(self) -> Tensor:
        """The tensor itself, or the shard of it that this process holds and that the basis is cut to."""
        return local(self.param)


@dataclasses.dataclass(eq=False)
class Direction(abc.ABC):
    """The line θ + s·Pz.  ``move(s)`` makes every read of the weights see that point; leaving the context undoes it.

    ::

        with direction:
            direction.move(+eps)
            plus = objective()
            direction.move(-eps)
            minus = objective()

    Args:
        key: address of z.
        members: the tensors of the active block.
        paired: whether copies on both sides of θ may exist at the same time, if that is faster.
    """

    key: Key
    members: Sequence[Member]
    paired: bool = True

    read: bool = dataclasses.field(default=False, init=False)
    """Whether the objective read a perturbed tensor; only a direction that intercepts reads knows."""

    @abc.abstractmethod
    def move(self, scale: float) -> None:
        """Move to θ + scale·Pz."""

    def __enter__(self) -> Self:
        return self

    @abc.abstractmethod
    def __exit__(self, *exception: object) -> None:
        """Show the unperturbed weights again."""


class Point(NamedTuple):
    """The point θ + scale·Pz of a direction."""

    direction: Direction
    scale: float


def visit(points: Sequence[Point], evaluate: Callable[[], Any]) -> list[Any]:
    """Move to one point after another and evaluate there."""
    values = []
    for direction, group in itertools.groupby(points, key=lambda point: point.direction):
        with uninterrupted() as shield, direction:
            for point in group:
                direction.move(point.scale)
                with shield.opened():
                    values.append(evaluate())
    return values


class Swapped(Direction):
    """Every active tensor points to a perturbed copy: one block of extra memory, no overhead in the forward pass."""

    def __enter__(self) -> Self:
        self.originals = [member.param.data for member in self.members]
        return self

    def move(self, scale: float) -> None:
        for member, original in zip(self.members, self.originals, strict=True):
            member.param.data = original  # drops the previous copies before the next ones are made
        places = [(original, member.basis) for member, original in zip(self.members, self.originals, strict=True)]
        for member, copy in zip(self.members, together.perturbed(places, self.key, scale), strict=True):
            member.param.data = copy

    def __exit__(self, *exception: object) -> None:
        with uninterrupted():
            for member, original in zip(self.members, self.originals, strict=True):
                member.param.data = original


class Written(Direction):
    """Writes the weights themselves and restores them exactly from a copy: a block's shards of extra memory.

    For sharded weights, which a forward pass gathers from their own memory.

    Args:
        release: drops the weights that an earlier pass gathered.
    """

    def __init__(self, key: Key, members: Sequence[Member], paired: bool, release: Callable[[], None]) -> None:
        super().__init__(key, members, paired)
        self.release = release

    def __enter__(self) -> Self:
        self.originals = [member.local.clone() for member in self.members]
        return self

    def move(self, scale: float) -> None:
        self.release()
        for member, original in zip(self.members, self.originals, strict=True):
            member.local.copy_(member.perturbed(original, self.key, scale))

    def __exit__(self, *exception: object) -> None:
        with uninterrupted():
            self.release()
            for member, original in zip(self.members, self.originals, strict=True):
                member.local.copy_(original)


class JustInTime(Direction):
    """Perturbs an active tensor when a torch function reads it: extra memory for the largest layer at most.

    Args:
        budget: bytes of copies to keep; the oldest are dropped first, and the copy in use may exceed it.
    """

    def __init__(self, key: Key, members: Sequence[Member], paired: bool, budget: int) -> None:
        super().__init__(key, members, paired)
        self.scale = 0.0
        self.mode = _Substitute(self._perturbed, {id(m.param): m for m in members}, budget)

    def _perturbed(self, member: Member) -> Tensor:
        return member.perturbed(member.param, self.key, self.scale)

    def __enter__(self) -> Self:
        # Compiled code would bypass the mode.  Importing the compiler takes a second, so only do it where it is in use.
        self.stance = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else None
        if self.stance is not None:
            self.stance.__enter__()
        self.mode.__enter__()
        return self

    def move(self, scale: float) -> None:
        self._leave()
        self.scale, self.mode.active = scale, scale != 0 or any(member.basis.behind for member in self.members)

    def _leave(self) -> None:
        """Leave the current point, and raise if the objective never read the weights there."""
        unread = self.scale and self.mode.active and self.mode.called and not self.mode.read
        self.read = self.read or self.mode.read
        self._rest()
        if unread:
            raise ZeroBlockError(
                f"{UNREAD}; for a traced or scripted copy of the model, or one that runs in another thread, use "
                "restore='subtract', which moves the weights themselves, or a block method"
            )

    def _rest(self) -> None:
        self.mode.active = self.mode.called = self.mode.read = False
        self.mode.copies.clear()

    def __exit__(self, *exception: object) -> None:
        try:
            self._leave() if exception[0] is None else self._rest()
        finally:
            with uninterrupted():
                self.mode.__exit__(*exception)
                if self.stance is not None:
                    self.stance.__exit__(*exception)


class Subtracted(Direction):
    """MeZO's way: moves the weights themselves, and moves them back by subtraction.

    No extra memory, but 16-bit weights do not return to where they were.

    Args:
        release: drops the sharded weights that an earlier pass gathered.
    """

    position = 0.0

    def __init__(
        self, key: Key, members: Sequence[Member], paired: bool, release: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(key, members, paired)
        self.release = release

    def move(self, scale: float) -> None:
        with uninterrupted():  # half a move could not be undone
            self.release()
            for member in self.members:
                member.basis.add_(member.local, self.key, (scale - self.position,), 1.0)
            self.position = scale

    def __exit__(self, *exception: object) -> None:
        self.move(0.0)


def _metadata() -> set[Any]:
    names = (
        "shape dtype device layout ndim requires_grad is_leaf grad grad_fn is_cuda is_cpu is_meta is_sparse "
        "is_quantized is_nested itemsize nbytes output_nr _version _backward_hooks _base "
        "size dim numel nelement stride element_size is_contiguous is_floating_point is_complex storage_offset "
        "get_device is_shared __len__ __hash__ ndimension"
    )
    functions = set()
    for name in names.split():
        attribute = getattr(torch.Tensor, name, None)
        if attribute is not None:
            functions.add(attribute if callable(attribute) else attribute.__get__)
    return functions


METADATA = _metadata()
"""Functions that ask for a tensor's properties and never read its values."""


class Mode(TorchFunctionMode):
    """A mode that leaves nothing on torch's stack after Ctrl-C.

    Torch takes a mode off its stack while the mode handles a function.  An interrupt there may lose the mode, or
    leave it to a suspended context manager that puts it back whenever the traceback is forgotten.
    """

    def __exit__(self, *exception: Any) -> None:
        for frame, _ in traceback.walk_tb(exception[2]):
            generator: Any = getattr(frame.f_locals.get("self"), "gen", None)
            if getattr(generator, "gi_code", None) is _POPPING:
                generator.close()  # puts its mode back now
        if self in torch.overrides._get_current_function_mode_stack():
            while torch.overrides._pop_mode() is not self:  # also a mode that an interrupt kept from exiting
                pass


_POPPING = torch.overrides._pop_mode_temporarily.__wrapped__.__code__  # type: ignore[attr-defined]
"""The context manager by which torch takes a mode off its stack."""


class _Substitute(Mode):
    """Passes every torch function a perturbed copy in place of an active tensor."""

    def __init__(self, make: Callable[[Member], Tensor], members: dict[int, Member], budget: int) -> None:
        super().__init__()
        self.make, self.members, self.budget = make, members, budget
        self.copies: OrderedDict[int, Tensor] = OrderedDict()
        self.active = self.called = self.read = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.active and func not in METADATA:
            self.called = True
            args = tuple(self._swap(a) for a in args)
            kwargs = {name: self._swap(a) for name, a in kwargs.items()}
        return func(*args, **kwargs)

    def _swap(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            member = self.members.get(id(argument))
            return argument if member is None else self._copy(member)
        if isinstance(argument, (list, tuple)) and any(isinstance(a, (Tensor, list, tuple)) for a in argument):
            swapped = [self._swap(a) for a in argument]
            return swapped if isinstance(argument, list) else tuple(swapped)
        return argument

    def _copy(self, member: Member) -> Tensor:
        self.read = True
        copy = self.copies.get(id(member.param))
        if copy is None:
            free = self.budget - member.param.nbytes
            while self.copies and sum(c.nbytes for c in self.copies.values()) > free:
                self.copies.popitem(last=False)
            copy = self.make(member)
            if free >= 0:
                self.copies[id(member.param)] = copy
        return copy
