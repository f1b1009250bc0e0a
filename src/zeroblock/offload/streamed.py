"""Layers that come to the device when they run: a few buffers, filled ahead of their use.

Layers run in the same order in every pass, so the next ones are known.  A buffer is filled again as soon as
its layer has run.  Two or three buffers are enough for that; with more, the layers that will be needed last
are replaced, so that the first layers of a pass stay on the device from pass to pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..amount import words
from ..direction import Member
from ..errors import ZeroBlockError
from ..interrupt import uninterrupted
from .lane import Buffer, Lane
from .layout import CONVERTED
from .region import Region
from .shelf import GRADIENTS, Layer, Shelf, watch

AHEAD = 2
"""The number of layers to copy ahead of their use."""
MIN_BUFFERS = 2
"""One layer runs while the next one is copied."""


class Streamed(Shelf):
    """Weights that rest in memory of the host, or in a file, and come to a device layer by layer.

    Args:
        layers: the layers in the order in which they run, at rest in the region.
        region: the region that holds them.
        device: the device that they run on.
        buffers: the number of layers that fit there at a time.
    """

    streams, pairs = True, False

    def __init__(self, layers: Sequence[Layer], region: Region, device: torch.device, buffers: int) -> None:
        super().__init__(device)
        if buffers < min(MIN_BUFFERS, len(layers)):
            raise ZeroBlockError(f"streamed layers need at least {MIN_BUFFERS} buffers, got {buffers}")
        self.layers, self.region = list(layers), region
        self.lane = Lane(device, max(layer.layout.nbytes for layer in layers), region.pinned)
        self.buffers = [self.lane.buffer() for _ in range(min(buffers, len(layers)))]
        self._home = {id(tensor): i for i, layer in enumerate(layers) for tensor in layer.tensors}
        self._inside = {id(m): i for i, layer in enumerate(layers) if layer.module for m in layer.module.modules()}
        self._where: dict[int, Buffer] = {}
        """The buffer that holds a layer, by the layer's number."""
        self._written: list[Any] = [self.lane.event() for _ in layers]
        """For every layer, the event after which it is whole at rest."""
        self._lifted: dict[int, set[int]] = {}
        """The layers that stay on the device during a step, each with the numbers of its tensors that have moved."""
        self._last = len(layers) - 1
        """The layer that ran last."""
        self._ends = watch(self.layers, self._enter, self._leave)

    # the interface of the step and the engine

    def place(self, param: Tensor) -> torch.device:
        assert self.device is not None
        return self.device if id(param) in self._home else param.device

    def value(self, param: Tensor) -> Tensor:
        return param.detach().to(self.place(param))

    def lifts(self, members: Sequence[Member]) -> bool:
        count, buffers = len(self._layers_of(members)), len(self.buffers)
        return count <= (buffers if buffers == len(self.layers) else buffers - MIN_BUFFERS)

    @contextlib.contextmanager
    def lifted(self, members: Sequence[Member]) -> Iterator[None]:
        wanted = self._layers_of(members)
        if self._lifted or not wanted or not self.lifts(members):
            yield
            return
        try:
            for i in wanted:
                self._fetch(i)
                self._lifted[i] = set()
            yield
        finally:
            with uninterrupted():
                for i in [i for i in wanted if i in self._lifted]:
                    self._put_down(i, self._where[i], self._lifted.pop(i))
                self.lane.finish()

    def visits(self, members: Sequence[Member], folds: bool = False) -> Iterator[Sequence[Member]]:
        here: list[Member] = []
        away: dict[int, list[Member]] = {}
        for member in members:
            i = self._home.get(id(member.param))
            (here if i is None or i in self._lifted else away.setdefault(i, [])).append(member)
        for member in here:
            i = self._home.get(id(member.param))
            if i is not None and (folds or not member.basis.behind):
                self._lifted[i].add(self._number(i, member))
        if here:
            yield here
        try:
            for i, mine in away.items():
                with self._visited(i, {self._number(i, m) for m in mine if folds or not m.basis.behind}):
                    yield mine
        finally:
            self.lane.finish()

    @contextlib.contextmanager
    def showing(self, module: nn.Module) -> Iterator[None]:
        i = self._inside.get(id(module))
        if i is None or i in self._lifted:
            yield
            return
        self._fetch(i)
        try:
            yield
        finally:
            self._leave(i)

    def describe(self) -> str:
        kept = max(0, len(self.buffers) - MIN_BUFFERS - 1)
        where = "on the host, pinned" if self.region.pinned else "on the host, in memory or in a file"
        if len(self.buffers) == len(self.layers):
            return f"all {len(self.layers)} layers fit on {self.device}; at rest the weights are {where}"
        return (
            f"{len(self.layers) - kept} of {len(self.layers)} layers are copied to {self.device} in every pass, into "
            f"{len(self.buffers)} buffers of {words(self.lane.size)}; at rest the weights are {where}. Steps are "
            "not captured as CUDA graphs: a launch takes almost no time compared with a copy"
        )

    def refresh(self) -> None:
        """Copy every layer again when it next runs; needed after its values at rest have changed through ``.data``."""
        self._tidy()
        for i, buffer in list(self._where.items()):
            if i not in self._lifted:
                del self._where[i]
                buffer.layer = None

    def close(self) -> None:
        self._tidy()
        for end in self._ends:
            end()
        self.lane.close()

    # how layers come and go

    def _enter(self, i: int) -> None:
        """A layer is about to run."""
        if torch.is_grad_enabled() and self.layers[i].trains:
            raise ZeroBlockError(GRADIENTS)
        if i not in self._lifted:
            self._fetch(i)

    def _leave(self, i: int) -> None:
        """A layer has run, or failed."""
        buffer = self._where.get(i)
        if buffer is None:
            return
        if i not in self._lifted:
            self._rest(buffer)
        self.lane.leave(buffer)
        self._last = i
        self._fetch_ahead(i)

    def _fetch(self, i: int) -> None:
        """Bring a layer to the device and let the model hold it there."""
        with torch._C.DisableTorchFunction():  # a direction would replace the tensors moved here by copies
            self._tidy()
            buffer = self._where.get(i)
            if buffer is None or buffer.versions != self.layers[i].versions:
                buffer = self._bring(i, buffer or self._victim())
            self._show(i, buffer)

    def _show(self, i: int, buffer: Buffer) -> None:
        self.lane.arrive(buffer)
        buffer.busy = True  # first, so that _tidy sees it after an interrupt
        self.layers[i].show(self._views(i, buffer))

    def _rest(self, buffer: Buffer) -> None:
        assert buffer.layer is not None
        with torch._C.DisableTorchFunction():
            self.layers[buffer.layer].rest()
        buffer.busy = False

    def _tidy(self) -> None:
        """Put layers back to rest that an interrupt has left on the device."""
        for buffer in self.buffers:
            if buffer.busy and buffer.layer not in self._lifted:
                self._rest(buffer)
                self.lane.leave(buffer)

    def _fetch_ahead(self, last: int) -> None:
        """Start to copy the next layers into buffers of layers that are needed later."""
        count = len(self.layers)
        for ahead in range(1, min(AHEAD, count - 1) + 1):
            i = (last + ahead) % count
            buffer = self._where.get(i)
            if buffer is not None and (buffer.busy or buffer.versions == self.layers[i].versions):
                continue
            free = [one for one in self.buffers if not one.busy]
            if not free:
                return
            victim = buffer or max(free, key=self._lateness)
            if buffer is None and self._lateness(victim) <= ahead:
                return
            with torch._C.DisableTorchFunction():
                self._bring(i, victim)

    def _victim(self) -> Buffer:
        """The buffer of the layer that will be needed last."""
        free = [buffer for buffer in self.buffers if not buffer.busy]
        assert free, "a step lifts so few layers that others can still run"
        return max(free, key=self._lateness)

    def _lateness(self, buffer: Buffer) -> float:
        """The number of layers until a buffer's layer is needed.

        The layer that ran last may still be running, so the one before it, needed almost as late, is replaced first.
        """
        count = len(self.layers)
        if buffer.layer is None:
            return 2 * count
        return count - 1.5 if buffer.layer == self._last else (buffer.layer - self._last) % count

    def _bring(self, i: int, buffer: Buffer, tensors: Collection[int] | None = None) -> Buffer:
        """Start to copy a layer, or some of its tensors, into a buffer."""
        layer = self.layers[i]
        if buffer.coming is not None:
            self.lane.arrive(buffer)  # a copy that was never used
        if buffer.layer is not None and self._where.get(buffer.layer) is buffer:
            del self._where[buffer.layer]
        whole = tensors is None or len(tensors) == len(layer.tensors)
        spans = [(0, layer.layout.nbytes)] if whole else layer.layout.spans(tensors or ())
        buffer.layer, buffer.versions = i, ()
        self._where[i] = buffer
        self.lane.bring(buffer, self.region.flat[slice(*layer.span)], spans, self._written[i])
        if whole:
            buffer.versions = layer.versions  # last: after an interrupt the layer is copied again
        return buffer

    def _views(self, i: int, buffer: Buffer) -> list[Tensor]:
        views = buffer.views.get(i)
        if views is None:
            with torch.inference_mode(False):  # they outlive the pass that first asks for them
                views = buffer.views[i] = self.layers[i].layout.views(buffer.flat)
        return views

    # how layers are written

    @contextlib.contextmanager
    def _visited(self, i: int, moved: set[int]) -> Iterator[None]:
        """A context in which some tensors of a layer are on the device to be moved, and are put back."""
        layer = self.layers[i]
        with torch._C.DisableTorchFunction():
            self._tidy()
            buffer = self._where.get(i)
            slots = [layer.layout.slots[n] for n in moved]
            mostly = 2 * sum(slot.nbytes for slot in slots) >= layer.layout.nbytes
            mostly = mostly or any(slot.dtype not in CONVERTED for slot in slots)  # integers move by their scales
            if buffer is None or buffer.versions != layer.versions:
                buffer = self._bring(i, buffer or self._victim(), None if mostly else moved)
                partial = not mostly
            else:
                partial = False
            self._show(i, buffer)
        try:
            yield
        finally:
            self._put_down(i, buffer, moved)
            if partial:
                self._where.pop(i)
                buffer.layer = None
        if mostly:
            self._last = i
            self._fetch_ahead(i)

    def _put_down(self, i: int, buffer: Buffer, moved: Collection[int]) -> None:
        """Start to copy the moved tensors back to rest, and let the model hold the layer there."""
        with torch._C.DisableTorchFunction():
            self.lane.leave(buffer)
            spans = self.layers[i].layout.spans(moved)
            if spans:
                target = self.region.flat[slice(*self.layers[i].span)]
                self.lane.put_back(buffer, target, spans, self._written[i])
            self._rest(buffer)
            buffer.versions = self.layers[i].versions

    def _layers_of(self, members: Sequence[Member]) -> list[int]:
        return sorted({i for m in members if (i := self._home.get(id(m.param))) is not None})

    def _number(self, i: int, member: Member) -> int:
        return next(n for n, tensor in enumerate(self.layers[i].tensors) if tensor is member.param)
