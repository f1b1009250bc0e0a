"""Branches of a CUDA graph: small kernels that do not depend on each other run side by side."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

BRANCHES = 6
"""Streams that a capture spreads its kernels over."""
MAX_BYTES = 1 << 26
"""The most bytes of tensors for which spreading pays."""

Item = TypeVar("Item")
_trunk: torch.cuda.Stream | None = None
"""The stream that a capture branched off."""


def home() -> contextlib.AbstractContextManager[object]:
    """A context in which a branch allocates on the stream that it branched off, so that the memory is reused."""
    return contextlib.nullcontext() if _trunk is None else torch.cuda.stream(_trunk)


def beside(items: Sequence[Item], nbytes: int) -> Iterator[Item]:
    """Yield items; while a graph is being captured, the kernels launched for each run next to those of the others.

    >>> list(beside([1, 2, 3], nbytes=12))
    [1, 2, 3]

    Args:
        items: the items of the loop.
        nbytes: the bytes of the tensors in the loop; large tensors keep the device busy by themselves.
    """
    if len(items) < 2 or nbytes > MAX_BYTES or not torch.cuda.is_available():
        yield from items
        return
    if not torch.cuda.is_current_stream_capturing():
        yield from items
        return
    global _trunk
    main = _trunk = torch.cuda.current_stream()
    streams = _streams(main.device.index)[: len(items)]
    for stream in streams:
        stream.wait_stream(main)
    try:
        for k, item in enumerate(items):
            with torch.cuda.stream(streams[k % len(streams)]):
                yield item
    finally:
        _trunk = None
        for stream in streams:
            main.wait_stream(stream)


@functools.cache
def _streams(device: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(BRANCHES)]
