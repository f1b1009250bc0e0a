"""The places where a forward pass can be cut into pieces, which are captured once and strung together.

    piece 0: embedding, tables ──► pieces 1 … L: a layer each ──► piece L+1: norm, head, loss

Only the hidden states pass from one piece to the next.  A trial run on a short row checks this: every
layer is called once, in order, on the previous layer's result; its other arguments existed before the
first layer ran; and no other code reads its weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..block import stacks
from ..direction import METADATA
from ..interrupt import uninterrupted
from ..step import Call, Tape
from .fork import Fork, restore

HIDDEN = "hidden_states"
"""The name of a layer's first argument, where it is passed by name."""

Forward = Callable[..., Any]


class CutError(Exception):
    """The pass of a model cannot be cut between its layers."""


@dataclasses.dataclass(frozen=True)
class Cuts:
    """The pieces of a model's forward pass.

    Args:
        layers: the layers, in the order of their calls.
        templates: the output of each layer, with None in place of its hidden states.
        outside: for the id of each module outside the layers, the piece that the module runs in.
    """

    layers: tuple[nn.Module, ...]
    templates: tuple[Any, ...]
    outside: dict[int, int]

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return len(self.layers) + 2

    def piece(self, module: nn.Module) -> int:
        """The piece that a layer, or a module outside the layers, runs in."""
        for i, layer in enumerate(self.layers):
            if layer is module:
                return i + 1
        return self.outside.get(id(module), self.pieces - 1)


def find(model: nn.Module, run: Callable[[], Any]) -> Cuts:
    """Find the places where a model's pass can be cut, by a trial.

    Args:
        model: a model of any family.
        run: runs the model once, on a short row.

    Raises:
        CutError: if the pass cannot be cut, with the reason.
    """
    layers = [layer for stack in stacks(model) for layer in model.get_submodule(stack).children()]
    trial = _Trial(model, layers)
    with trial.listening(), torch.no_grad():
        run()
    return trial.cuts()


class _Trial:
    """Notes the order in which a model's modules run, the arguments of its layers, and the reads of their weights."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        self.model, self.layers = model, {id(layer): layer for layer in layers}
        self.inside: dict[int, nn.Module] = {id(m): layer for layer in layers for m in layer.modules()}
        self.owner = {id(p): layer for layer in layers for p in layer.parameters()}
        self.called: list[nn.Module] = []
        self.templates: list[Any] = []
        self.outside: dict[int, set[int]] = {}
        self.current: nn.Module | None = None
        self.last: Tensor | None = None
        self.made: dict[int, StorageWeakRef] = {}
        """Memory that was filled since the first layer began, by its address.  References are weak: matrices that are
        stored as integers are expanded one by one, and keeping all of them would take the model in 16 bits."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        hooks = []
        for module in self.model.modules():
            if id(module) in self.layers:
                hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
                hooks.append(module.register_forward_hook(self._leave))
            elif id(module) not in self.inside and not any(True for _ in module.children()):
                hooks.append(module.register_forward_pre_hook(self._beside))
        try:
            with _Made(self), _Reads(self):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = hidden_of(args, kwargs)
        if self.called and hidden is not self.last:
            raise CutError("the model computes something between its layers")
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and value is not hidden and self._is_new(value):
                raise CutError("a layer is given more than the last one's hidden states")
        self.called.append(layer)
        self.current = layer

    def _is_new(self, tensor: Tensor) -> bool:
        """Whether a tensor was made after the first layer began."""
        memory = self.made.get(_address(tensor))
        return memory is not None and not memory.expired()  # type: ignore[no-untyped-call]

    def _leave(self, layer: nn.Module, args: Any, out: Any) -> None:
        self.last, self.current = first(out), None
        self.templates.append(put(out, None))

    def _beside(self, module: nn.Module, args: Any) -> None:
        self.outside.setdefault(id(module), set()).add(len(self.called))

    def cuts(self) -> Cuts:
        """The pieces, after the run."""
        if not self.called or len(self.called) != len({id(layer) for layer in self.called}):
            raise CutError("a layer runs more than once, or none does")
        ends = {0: 0, len(self.called): len(self.called) + 1}
        outside = {}
        for module, places in self.outside.items():
            if len(places) != 1 or not places <= set(ends):
                raise CutError("a module outside the layers runs between them, or before and after them")
            outside[module] = ends[places.pop()]
        return Cuts(tuple(self.called), tuple(self.templates), outside)


class _Made(TorchDispatchMode):
    def __init__(self, trial: _Trial) -> None:
        super().__init__()
        self.trial = trial

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.trial.called:
            before = {_address(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
            for value in tree_leaves(out):  # a view of an argument is not new
                if isinstance(value, Tensor) and _address(value) not in before:
                    self.trial.made[_address(value)] = StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]
        return out


class _Reads(TorchFunctionMode):
    def __init__(self, trial: _Trial) -> None:
        super().__init__()
        self.trial = trial

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in METADATA:
            for value in (*args, *kwargs.values()):
                layer = self.trial.owner.get(id(value))
                if layer is not None and layer is not self.trial.current:
                    raise CutError("a layer's weights are read outside of it")
        return func(*args, **kwargs)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextlib.contextmanager
def cutting(cuts: Cuts, tape: Tape, fork: Fork | None) -> Iterator[None]:
    """A context in which a pass skips its layers, and calls a tape where they would run.

    Args:
        cuts: the cuts of the model that will run.
        tape: the tape that follows the pass.
        fork: the state of the pass, if it is forked; enter ``forking`` first.
    """
    replaced: list[tuple[nn.Module, Forward | None]] = []
    with uninterrupted() as shield:
        try:
            for i, layer in enumerate(cuts.layers):
                replaced.append((layer, vars(layer).get("forward")))
                vars(layer)["forward"] = _skipped(i, cuts, tape, fork)
            with shield.opened():
                yield
        finally:
            for layer, before in reversed(replaced):
                restore(layer, before)


def _skipped(i: int, cuts: Cuts, tape: Tape, fork: Fork | None) -> Forward:
    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = hidden_of(args, kwargs)
        tape.enter(i, hidden, Call(given(args, None), named(kwargs, None)))
        if i + 1 < len(cuts.layers):
            return put(cuts.templates[i], hidden)
        hidden, parted = tape.leave()
        if fork is not None:
            fork.parted = parted
        return put(cuts.templates[i], hidden)

    return forward


def hidden_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states that a layer is called with."""
    hidden = args[0] if args else kwargs.get(HIDDEN)
    if not isinstance(hidden, Tensor):
        raise CutError("a layer's first argument is not a tensor")
    return hidden


def given(args: tuple[Any, ...], hidden: Tensor | None) -> tuple[Any, ...]:
    """Positional arguments with other hidden states."""
    return (hidden, *args[1:]) if args else args


def named(kwargs: dict[str, Any], hidden: Tensor | None) -> dict[str, Any]:
    """Named arguments with other hidden states."""
    return {**kwargs, HIDDEN: hidden} if HIDDEN in kwargs else kwargs


def first(out: Any) -> Tensor:
    """The hidden states in the output of a layer."""
    hidden = out[0] if isinstance(out, tuple) else out
    others = tree_leaves(out[1:]) if isinstance(out, tuple) else ()
    if not isinstance(hidden, Tensor) or any(isinstance(value, Tensor) for value in others):
        raise CutError("a layer returns more than its hidden states")
    return hidden


def put(out: Any, hidden: Tensor | None) -> Any:
    """The output of a layer, with other hidden states."""
    return (hidden, *out[1:]) if isinstance(out, tuple) else hidden
