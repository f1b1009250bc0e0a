"""Copies between host and device, on separate streams, ordered with the kernels by events.

    incoming   ──copy 3──┐ ──copy 4──┐
    compute      layer 2 └─► layer 3 └─► layer 4      a layer waits for its copy, a copy for its buffer
    outgoing               └─► block back to the host

Nothing is allocated per step, and the host waits only for weights that have to be back before it reads them.
On the CPU, where tests exercise this, every copy completes immediately.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from .layout import Span

STAGES = 2
"""The number of pinned buffers for weights that cannot be pinned where they rest."""


class _Done:
    """An event on the CPU, where everything has happened already."""

    def record(self, stream: Any = None) -> None:
        """Nothing to note."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Buffer:
    """Memory on the device for one layer at a time.

    Args:
        flat: (bytes,) uint8 on the device.
        event: a function that makes an event.
    """

    def __init__(self, flat: Tensor, event: Any) -> None:
        self.flat = flat
        self.layer: int | None = None
        """The layer whose weights it holds, or will hold when ``ready`` has fired."""
        self.versions: tuple[int, ...] = ()
        """The versions of that layer when it was copied; empty if it was not copied whole."""
        self.busy = False
        """Whether the layer is running or lifted, so that no other layer may take the buffer."""
        self.ready, self.free = event(), event()
        self.coming: Future[None] | None = None
        """The copy under way, if a thread makes it."""
        self.views: dict[int, list[Tensor]] = {}
        """The tensors of a layer in this buffer, by its number."""


class Lane:
    """Copies between the memory where weights rest and buffers on a device.

    Args:
        device: the device of the buffers.
        size: bytes of a buffer.
        pinned: whether the device can read the memory where weights rest.
    """

    def __init__(self, device: torch.device, size: int, pinned: bool) -> None:
        self.device, self.size = device, size
        self.cuda = device.type == "cuda"
        self.event: Any = torch.cuda.Event if self.cuda else _Done
        self._incoming: Any = torch.cuda.Stream(device) if self.cuda else None
        self._outgoing: Any = torch.cuda.Stream(device) if self.cuda else None
        self._thread: ThreadPoolExecutor | None = None
        self._stages: list[tuple[Tensor, Any]] = []
        self._turn = 0
        self._still = False
        if self.cuda and not pinned:
            self._thread = ThreadPoolExecutor(1, "zeroblock-weights")
            self._stages = [(_pinned(size), self.event()) for _ in range(STAGES)]
        self.bytes_in = self.bytes_out = 0
        """Bytes copied so far, to the device and back."""

    def buffer(self) -> Buffer:
        """Make another buffer."""
        buffer = Buffer(torch.empty(self.size, dtype=torch.uint8, device=self.device), self.event)
        self.leave(buffer)  # kernels that used this memory before may still run
        return buffer

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """A context in which nothing is copied, to time the kernels alone; the weights are wrong in it."""
        self._still = True
        try:
            yield
        finally:
            self._still = False

    def bring(self, buffer: Buffer, source: Tensor, spans: Sequence[Span], after: Any) -> None:
        """Start to copy into a buffer, once its last layer has run and been copied back.

        Args:
            buffer: the destination; its ``ready`` event fires when the copy is done.
            source: (bytes,) the layer at rest.
            spans: the bytes to copy.
            after: the event after which the layer at rest is whole.
        """
        if self._still:
            return
        self.bytes_in += sum(stop - start for start, stop in spans)
        if self._thread is not None:
            self._turn = (self._turn + 1) % STAGES
            buffer.coming = self._thread.submit(self._through, buffer, source, spans, self._turn)
            return
        self._copy_in(buffer, source, spans, after)

    def _copy_in(self, buffer: Buffer, source: Tensor, spans: Sequence[Span], after: Any) -> None:
        with self._on(self._incoming):
            if self.cuda:
                self._incoming.wait_event(buffer.free)
                self._incoming.wait_event(after)
            for start, stop in spans:
                buffer.flat[start:stop].copy_(source[start:stop], non_blocking=True)
            buffer.ready.record(self._incoming)

    @torch.no_grad()
    def _through(self, buffer: Buffer, source: Tensor, spans: Sequence[Span], turn: int) -> None:
        """The same through a pinned buffer, in a thread; the main thread wrote the layer before it submitted this."""
        stage, sent = self._stages[turn]
        with torch.cuda.device(self.device):
            sent.synchronize()  # its last copy is done
            for start, stop in spans:
                stage[start:stop].copy_(source[start:stop])
            self._copy_in(buffer, stage, spans, sent)
            sent.record(self._incoming)

    def arrive(self, buffer: Buffer) -> None:
        """Make the kernels that follow wait until a buffer is filled."""
        if buffer.coming is not None:
            try:
                buffer.coming.result()
            except BaseException:  # after Ctrl-C the copy continues; a failed one left nothing
                if buffer.coming.done():
                    buffer.coming, buffer.versions = None, ()
                raise
            buffer.coming = None
        if self.cuda:
            torch.cuda.current_stream(self.device).wait_event(buffer.ready)

    def leave(self, buffer: Buffer) -> None:
        """Record that all kernels that read a buffer have been launched."""
        if self.cuda:
            buffer.free.record(torch.cuda.current_stream(self.device))

    def put_back(self, buffer: Buffer, target: Tensor, spans: Sequence[Span], written: Any) -> None:
        """Start to copy from a buffer, after ``leave``, to the place where the layer rests.

        Args:
            buffer: the source; its ``free`` event fires when it may be filled again.
            target: (bytes,) the layer at rest.
            spans: the bytes to copy.
            written: the event that fires when the copy is done.
        """
        if self._still:
            return
        self.bytes_out += sum(stop - start for start, stop in spans)
        if self._thread is not None:
            stage = self._out_stage
            torch.cuda.current_stream(self.device).synchronize()
            for start, stop in spans:
                stage[start:stop].copy_(buffer.flat[start:stop])
                target[start:stop].copy_(stage[start:stop])
            return
        with self._on(self._outgoing):
            if self.cuda:
                self._outgoing.wait_event(buffer.free)
            for start, stop in spans:
                target[start:stop].copy_(buffer.flat[start:stop], non_blocking=True)
            written.record(self._outgoing)
            buffer.free.record(self._outgoing)

    def _on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream) if self.cuda else contextlib.nullcontext()

    @property
    def _out_stage(self) -> Tensor:
        if len(self._stages) == STAGES:
            self._stages.append((_pinned(self.size), self.event()))
        return self._stages[STAGES][0]

    def finish(self) -> None:
        """Wait for all copies back to the host."""
        if self.cuda:
            self._outgoing.synchronize()

    def close(self) -> None:
        """Wait for all copies, so that the buffers can be freed."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if self.cuda:
            self._incoming.synchronize()
            self._outgoing.synchronize()

    def __del__(self) -> None:
        if hasattr(self, "_outgoing"):  # memory that is freed during a copy would be reused
            self.close()


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
