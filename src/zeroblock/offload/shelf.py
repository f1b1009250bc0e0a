"""The shelf, on which the weights of a model rest, as the step and the engine see it.

A model's parameters are always the same objects and always hold the right values: at rest the shelf's, on the
host; while their layer runs, or while a step moves them, a copy on the device.  So code that reads a model
between two steps (evaluation, snapshots, exports) need not know about shelves.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ..block import stacks
from ..direction import Member
from ..errors import ZeroBlockError
from .layout import Layout, Span
from .region import Region

GRADIENTS = (
    "weights that are streamed leave the device when their layer has run, so no backward pass can follow: call the "
    "model within torch.no_grad(), or leave out offload"
)


class Shelf:
    """A shelf whose weights rest where they are used: the default of every model, and the base of other shelves.

    Args:
        device: the device that the model computes on; by default each parameter's.
    """

    streams = False
    """Whether layers come to the device when they run."""
    pairs = True
    """Whether there is memory for copies of a layer on both sides of the weights at the same time."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.tokens: int | None = None
        """Tokens of the longest row, if the memory of the device is given."""
        self.pass_tokens: int | None = None
        """Tokens of the rows of one pass, all points together, if the memory of the device is given."""

    def place(self, param: Tensor) -> torch.device:
        """The device of a parameter while it is used."""
        return param.device

    def value(self, param: Tensor) -> Tensor:
        """The values of a parameter, on the device where it is used."""
        return param

    def lifts(self, members: Sequence[Member]) -> bool:
        """Whether a block fits on the device during a whole step."""
        return True

    def lifted(self, members: Sequence[Member]) -> contextlib.AbstractContextManager[None]:
        """A context in which a block is on the device, if it fits there."""
        return contextlib.nullcontext()

    def visits(self, members: Sequence[Member], folds: bool = False) -> Iterator[Sequence[Member]]:
        """The tensors of a block to be moved, layer by layer, while they are on the device.

        Args:
            members: the tensors of the block.
            folds: whether held steps are written to their tensors, too.
        """
        yield members

    def showing(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """A context in which the weights of a module, of one layer at most, are on the device."""
        return contextlib.nullcontext()

    def describe(self) -> str:
        """One line for the user; empty if there is nothing to say."""
        return ""

    def close(self) -> None:
        """Leave the weights where they rest and release the model."""


RESIDENT = Shelf()
_shelves: weakref.WeakKeyDictionary[nn.Module, Shelf] = weakref.WeakKeyDictionary()


def shelf_of(model: nn.Module) -> Shelf:
    """The shelf of a model."""
    return _shelves.get(model, RESIDENT)


def keep(model: nn.Module, shelf: Shelf) -> None:
    """Set the shelf of a model."""
    _shelves[model] = shelf


def forget(model: nn.Module) -> None:
    """Give a model the default shelf again."""
    _shelves.pop(model, None)


class Layer:
    """Tensors that rest together: one layer's, or all that are outside the layers.

    Args:
        module: the layer; None for the tensors outside the layers.
        tensors: parameters and buffers, the same objects that the model holds.
        dtype: see :class:`Layout`.
    """

    def __init__(self, module: nn.Module | None, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> None:
        self.module, self.tensors = module, list(tensors)
        self.layout = Layout(self.tensors, dtype)
        self.span: Span = (0, 0)
        """Its bytes in the region."""
        self.resting: list[Tensor] = []
        """The tensors at rest."""

    def lay(self, region: Region, start: int) -> None:
        """Copy the tensors into the region, and let the model hold them there."""
        self.span = (start, start + self.layout.nbytes)
        self.resting = self.layout.views(region.flat[slice(*self.span)])
        for tensor, resting in zip(self.tensors, self.resting, strict=True):
            resting.copy_(tensor.data)
            tensor.data = resting

    @property
    def trains(self) -> bool:
        """Whether any of its tensors may move."""
        return any(tensor.requires_grad for tensor in self.tensors)

    @property
    def versions(self) -> tuple[int, ...]:
        """Numbers that change when code writes to the tensors at rest, except through ``.data``."""
        return tuple(tensor._version for tensor in self.tensors)

    def show(self, views: Sequence[Tensor]) -> None:
        """Let the model hold the same values in other memory."""
        for tensor, view, resting in zip(self.tensors, views, self.resting, strict=True):
            if tensor.data_ptr() != resting.data_ptr():
                raise ZeroBlockError(
                    "the model was moved, cast or given other tensors after its weights were put on the shelf: first "
                    "change the model, then call shelve"
                )
            tensor.data = view

    def rest(self) -> None:
        """Let the model hold the tensors at rest."""
        for tensor, resting in zip(self.tensors, self.resting, strict=True):
            tensor.data = resting


class Watching:
    """A hook that does not change a module's output, so that the engine may still fuse the module."""

    transparent = True

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def __call__(self, *args: object) -> None:
        self.call()


def watch(
    layers: Sequence[Layer], enter: Callable[[int], None], leave: Callable[[int], None]
) -> list[Callable[[], None]]:
    """Call ``enter`` and ``leave`` with a layer's number before and after it runs; return functions that end this."""
    ends: list[Callable[[], None]] = []
    for i, layer in enumerate(layers):
        assert layer.module is not None

        def before(i: int = i) -> None:
            enter(i)

        def after(i: int = i) -> None:
            leave(i)

        ends.append(layer.module.register_forward_pre_hook(Watching(before), prepend=True).remove)
        ends.append(layer.module.register_forward_hook(Watching(after), always_call=True).remove)
    return ends


def layers_of(model: nn.Module, dtype: torch.dtype | None = None) -> tuple[list[Layer], Layer]:
    """The layers of a model, and everything outside them.

    A tensor that two layers share is outside, and so are lists of embeddings (a prefix), which are read without a call.
    """
    items = [layer for path in stacks(model) for layer in model.get_submodule(path).children()]
    modules = [layer for layer in items if not isinstance(layer, nn.Embedding)]
    everything = {id(t): t for t in (*model.parameters(), *model.buffers())}
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                owners.setdefault(id(tensor), set()).add(id(module))
    layers, inside = [], set[int]()
    for module in modules:
        own = set(map(id, module.modules()))
        tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
        mine = [tensor for key, tensor in tensors.items() if owners[key] <= own]
        if mine:
            layers.append(Layer(module, mine, dtype))
            inside.update(map(id, mine))
    return layers, Layer(None, [tensor for key, tensor in everything.items() if key not in inside], dtype)
