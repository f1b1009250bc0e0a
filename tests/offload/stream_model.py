"""A model of CUDA's streams on the CPU, in which copies come as late as they may, and races are errors.

Kernels run when they are launched.  A copy on a stream of its own waits in a queue until somebody waits for it; that
is the latest that a GPU could make it.  The other way about, a kernel that a GPU would run late and a copy that does
not wait for it, is found by vector clocks: two accesses to the same bytes, one of them a write, need an event between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from zeroblock.offload import lane as lanes
from zeroblock.offload.lane import Buffer, Lane
from zeroblock.offload.streamed import Streamed


class Access(NamedTuple):
    """Bytes that a stream has touched."""

    start: int
    stop: int
    writes: bool
    stream: str
    tick: int


class Arrival(NamedTuple):
    """A layer that kernels wait for."""

    layer: int
    launched: int
    """Kernels that were launched before."""
    waited: int
    """How many of them its copy waits for."""


class Stream:
    """A queue of copies, and what it knows of the other streams."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name = machine, name
        self.clock: dict[str, int] = {}
        self.queue: list[Callable[[], object]] = []
        self.done = 0

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            with _disable_current_modes():
                self.queue[self.done - 1]()

    def knows(self, clock: dict[str, int]) -> None:
        for name, tick in clock.items():
            self.clock[name] = max(tick, self.clock.get(name, 0))

    def wait_event(self, event: Event) -> None:
        self.knows(event.clock)
        if self is self.machine.compute:
            event.run()
        else:
            position = event.position  # the record of this moment, whatever is recorded later
            self.queue.append(lambda: event.run(position))

    def synchronize(self) -> None:
        self.run(len(self.queue))
        self.machine.host.knows(self.clock)


class Event:
    """The point that a stream had reached when the event was recorded."""

    machine: Machine

    def __init__(self) -> None:
        self.clock: dict[str, int] = {}
        self.position: tuple[Stream, int] | None = None

    def record(self, stream: Stream) -> None:
        self.clock, self.position = dict(stream.clock), (stream, len(stream.queue))

    def run(self, position: tuple[Stream, int] | None = None) -> None:
        found = position or self.position
        if found is not None:
            found[0].run(found[1])

    def synchronize(self) -> None:
        self.run()
        self.machine.host.knows(self.clock)


class Soon:
    """A thread that does what it is asked for when somebody waits for it."""

    def __init__(self, *args: object) -> None: ...

    def submit(self, call: Callable[..., Any], *args: Any) -> Any:
        return Later(call, args)

    def shutdown(self) -> None: ...


class Later:
    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.call, self.args = call, args

    def result(self) -> Any:
        return self.call(*self.args)


class Machine(TorchDispatchMode):
    """A GPU without one."""

    def __init__(self) -> None:
        super().__init__()
        self.host, self.compute = Stream(self, "host"), Stream(self, "compute")
        self.current: Stream | None = None
        self.watched: dict[int, list[Access]] = {}
        """Accesses to some storages, by address."""
        self.device: set[int] = set()
        """Those of them that lie on the device."""
        self.arrivals: list[Arrival] = []
        """The layers that kernels have waited for, in order."""

    def touch(self, tensor: Tensor, writes: bool, stream: Stream) -> None:
        """Note an access; raises if another stream has touched the same bytes and this one does not know."""
        address = tensor.untyped_storage().data_ptr()
        if address not in self.watched or not tensor.numel():
            return
        stream.knows(self.host.clock)  # a launch follows all that the host has waited for
        stream.clock[stream.name] = tick = stream.clock.get(stream.name, 0) + 1
        start = tensor.storage_offset() * tensor.element_size()
        new = Access(start, start + tensor.nbytes, writes, stream.name, tick)
        known = self.watched[address]
        for old in known:
            overlap = old.start < new.stop and new.start < old.stop
            if overlap and (old.writes or writes) and stream.clock.get(old.stream, 0) < old.tick:
                raise AssertionError(f"{new} does not wait for {old}")
        known[:] = [old for old in known if not (new.start <= old.start and old.stop <= new.stop and writes)]
        known.append(new)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.current is not None and func is torch.ops.aten.copy_.default:
            target, source = args[0], args[1]
            self.touch(source, False, self.current)
            self.touch(target, True, self.current)
            self.current.queue.append(lambda: func(target, source))
            return target
        if not any(kind in str(func) for kind in ("view", "slice", "detach", "alias", "as_strided", "select")):
            written = {a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write}
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if isinstance(value, Tensor):
                    there = value.untyped_storage().data_ptr() in self.device
                    self.touch(value, argument.name in written, self.compute if there else self.host)
                    if there and func is torch.ops.aten.copy_.default:  # to the host, which waits for it
                        self.host.knows(self.compute.clock)
        return func(*args, **kwargs)


class Modelled(Lane):
    """A lane whose streams are a machine's."""

    machine: Machine

    def bring(self, buffer: Buffer, source: Tensor, spans: Any, after: Any) -> None:
        super().bring(buffer, source, spans, after)
        buffer.waited = self._incoming.clock.get("compute", 0)  # type: ignore[attr-defined]

    def arrive(self, buffer: Buffer) -> None:
        super().arrive(buffer)
        assert buffer.layer is not None
        launched = self.machine.compute.clock.get("compute", 0)
        self.machine.arrivals.append(Arrival(buffer.layer, launched, buffer.waited))  # type: ignore[attr-defined]
        self.machine.touch(buffer.flat, False, self.machine.compute)

    def leave(self, buffer: Buffer) -> None:
        self.machine.touch(buffer.flat, True, self.machine.compute)  # kernels of ours do not show in torch's dispatch
        super().leave(buffer)


@contextlib.contextmanager
def modelled(shelf: Streamed, buffers: int, pinned: bool = True) -> Iterator[Machine]:
    """A context in which a shelf that was made on the CPU copies on the streams of a machine."""
    machine = Machine()
    Event.machine = machine

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, machine.current = machine.current, stream
        yield
        machine.current = before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", lambda device: Stream(machine, "copies"))
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", on)
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda device=None: machine.compute)
        patch.setattr(lanes, "ThreadPoolExecutor", Soon)
        patch.setattr(lanes, "_pinned", lambda size: torch.empty(size, dtype=torch.uint8))
        Modelled.machine = machine
        device: Any = type("Device", (), {"type": "cuda"})()
        lane = Modelled(device, shelf.lane.size, pinned)
        lane._incoming.name, lane._outgoing.name = "incoming", "outgoing"
        lane.device = torch.device("cpu")
        shelf.refresh()
        shelf.lane, shelf.buffers = lane, [lane.buffer() for _ in range(buffers)]
        shelf._written = [Event() for _ in shelf.layers]
        flats = [buffer.flat for buffer in shelf.buffers]
        machine.device = {flat.untyped_storage().data_ptr() for flat in flats}
        others = [shelf.region.flat, *(stage for stage, _ in lane._stages)]
        machine.watched = {flat.untyped_storage().data_ptr(): [] for flat in (*flats, *others)}
        with machine:
            yield machine
