"""Tables of numbers that kernels read on the device, each made once.

A captured graph reads its tables at the addresses that they had during the capture.  So a table is never made in a
capture; it never lies in the memory that graphs compute in, where an older graph would overwrite it; and the graph
keeps it alive.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST = 4096
"""The most tables that are kept for later launches, about 2 KiB each: a block of weights has two to four."""


class Table(NamedTuple):
    """Numbers on the device, and what a launch needs to know about them on the host."""

    numbers: Tensor
    about: Any


class _Now(threading.local):
    """The state of this thread."""

    trial: dict[Hashable, tuple[Table, Table]] | None = None
    """In a trial run: the tables made in it, on the host and on the device."""
    reads: list[Tensor] | None = None
    """In a capture: the tables that the graph reads."""


_known: OrderedDict[Hashable, Table] = OrderedDict()
_changing = threading.Lock()
_now = _Now()


def table(key: Hashable, device: torch.device, make: Callable[[], Table]) -> Table | None:
    """A table on the device; None if it would have to be made, or could not be kept, in a capture.

    Args:
        key: everything that the table depends on, addresses included: equal keys mean equal numbers.
        device: the device of the table.
        make: makes the table on the host.
    """
    key = (key, _stream(device))  # a copy on a stream is complete before the stream's later kernels run
    with _changing:
        found = _known.get(key)
        if found is not None:
            _known.move_to_end(key)
    if _capturing(device):
        if found is None or _now.reads is None:
            return None
        _now.reads.append(found.numbers)
        return found
    if found is not None:
        return found
    if _now.trial is None:
        return _keep(key, make(), device)
    if key not in _now.trial:
        made = make()
        _now.trial[key] = made, _sent(made, device)
    return _now.trial[key][1]


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """A context for a run that computes in the memory of graphs; afterwards it sends the tables again, elsewhere."""
    made = _now.trial = {}
    try:
        yield
    finally:
        _now.trial = None
        for key, (host, tried) in made.items():
            if not _capturing(tried.numbers.device):
                _keep(key, host, tried.numbers.device)


def captured(reads: list[Tensor] | None) -> None:
    """From now on, collect the tables that launches read in a list, which the captured graph keeps; None: stop."""
    _now.reads = reads


def _keep(key: Hashable, made: Table, device: torch.device) -> Table:
    kept = _sent(made, device)
    with _changing:
        full = len(_known) >= MOST
        old = [_known.popitem(last=False)[1] for _ in range(MOST // 2)] if full else []  # so that synchronizing is rare
        _known[key] = kept
    for place in {one.numbers.device for one in old if one.numbers.is_cuda}:
        torch.cuda.synchronize(place)  # a kernel may still read one
    return kept


def _sent(made: Table, device: torch.device) -> Table:
    """The table on the device, by an asynchronous copy on the current stream."""
    numbers = made.numbers.pin_memory() if device.type == "cuda" else made.numbers
    return made._replace(numbers=numbers.to(device, non_blocking=True))


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
