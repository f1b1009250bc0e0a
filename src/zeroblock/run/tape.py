"""A forward pass in pieces: each is captured once per shape of row, whichever block is active elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..ops.shared import tables
from ..step import Call

GROUP = 12
"""Layers that are captured together.  A graph takes a megabyte of memory and some microseconds to launch, whatever its
size; but the group of the active layer is captured once for every block in it.  OPT-125M on an H200: 0.771 ms per step
with 12 and 0.791 with 5; OPT-13B takes as long with 10 as with 5, and has 15 % fewer graphs."""


class FinishedError(Exception):
    """Ends a pass whose rest is not needed."""


class Piece(NamedTuple):
    """A piece of a forward pass.

    Args:
        key: everything that its kernels depend on besides the shape of the row.
        active: whether it reads tensors of the active block.
        before: number of rows of its hidden states.
        after: number of rows of its result.
    """

    key: tuple[object, ...]
    active: bool
    before: int
    after: int


class Frame:
    """The graphs and buffers that the captured pieces of one shape of row share.

    Hidden states pass from piece to piece through one buffer per number of rows, and every layer
    gets the arguments that the first piece, captured for this frame, computes at fixed addresses.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graphs: dict[tuple[object, ...], torch.cuda.CUDAGraph] = {}
        self.strings: dict[tuple[object, ...], list[torch.cuda.CUDAGraph]] = {}
        """The graphs of a whole step, in order."""
        self.calls: dict[int, Call] = {}
        """The arguments of every layer, without its hidden states."""
        self.hidden: Tensor | None = None
        """A meta tensor with the shape and dtype of the hidden states of one row."""
        self.bytes = 0
        """Device memory that the graphs themselves hold."""
        self._carries: dict[int, Tensor] = {}

    def carry(self, rows: int) -> Tensor:
        """(rows, S, width) the buffer that hidden states of ``rows`` rows pass through."""
        if rows not in self._carries:
            assert self.hidden is not None
            shape = (rows, *self.hidden.shape[1:])
            self._carries[rows] = torch.zeros(shape, dtype=self.hidden.dtype, device=self.device)
        return self._carries[rows]


class Recorder:
    """Captures pieces of one frame.

    Args:
        frame: keeps the captured graphs.
        pool: memory that the graphs compute in.
    """

    def __init__(self, frame: Frame, pool: torch.cuda.MemPool) -> None:
        self.frame, self.pool = frame, pool
        self._open: tuple[tuple[object, ...], torch.cuda.CUDAGraph] | None = None

    def begin(self, key: tuple[object, ...]) -> None:
        """Start a capture."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=cast(Any, self.pool.id), capture_error_mode="thread_local")
        self._open = key, graph
        reads = vars(graph)["tables"] = []  # they must live as long as the graph
        tables.captured(reads)

    def end(self) -> None:
        """End the capture, and keep its graph."""
        if self._open is not None:
            (key, graph), self._open = self._open, None
            tables.captured(None)
            graph.capture_end()
            self.frame.graphs[key] = graph

    @contextlib.contextmanager
    def recorded(self, key: tuple[object, ...]) -> Iterator[None]:
        """A context that is captured."""
        self.begin(key)
        with self.saved():
            yield
            self.end()

    @contextlib.contextmanager
    def saved(self) -> Iterator[None]:
        """A context that leaves no capture open, whatever happens in it."""
        try:
            yield
        finally:
            if self._open is not None:
                (_, graph), self._open = self._open, None
                tables.captured(None)
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()

    @contextlib.contextmanager
    def tried(self) -> Iterator[None]:
        """A context that computes in the pool without being captured."""
        with tables.trial(), torch.cuda.use_mem_pool(self.pool, self.frame.device):
            yield


class Opening:
    """Follows the first pass of a frame: captures what comes before the layers, and keeps their arguments.

    It follows the pass twice: the first time it only notes the shape of the hidden states; see :class:`step.Tape`.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.frame = recorder, recorder.frame

    def enter(self, layer: int, hidden: Tensor, call: Call) -> None:
        if self.frame.hidden is None:
            self.frame.hidden = torch.empty_like(hidden, device="meta")
            raise FinishedError
        if layer == 0:
            self.frame.carry(1).copy_(hidden)
            self.recorder.end()
        self.frame.calls[layer] = call

    def leave(self) -> tuple[Tensor, bool]:
        raise FinishedError


class Ends:
    """Follows a pass to capture the piece before the layers, with an active embedding, or the piece after them.

    Args:
        recorder: captures the pieces.
        first: the piece before the layers, if it is to be captured.
        last: the piece after the layers, if it is to be captured.
        parted: whether the hidden states after the layers are rows of several points.
    """

    def __init__(self, recorder: Recorder, first: Piece | None, last: Piece | None, parted: bool) -> None:
        self.recorder, self.first, self.last, self.parted = recorder, first, last, parted
        self.unwanted = contextlib.ExitStack()
        """The context for a first piece that is not captured, which computes in the pool, too."""
        if first is not None:
            recorder.begin(first.key)
        else:
            self.unwanted.enter_context(recorder.tried())

    def enter(self, layer: int, hidden: Tensor, call: Call) -> None:
        self.unwanted.close()
        if layer == 0 and self.first is not None:
            self.recorder.frame.carry(self.first.after).copy_(hidden)
            self.recorder.end()
        if self.last is None:
            raise FinishedError

    def leave(self) -> tuple[Tensor, bool]:
        assert self.last is not None
        self.recorder.begin(self.last.key)
        return self.recorder.frame.carry(self.last.before), self.parted


class Stretch(NamedTuple):
    """Consecutive layers that are captured as one graph.

    Args:
        key: everything that their kernels depend on.
        first: number of the first piece.
        pieces: the pieces of the layers.
    """

    key: tuple[object, ...]
    first: int
    pieces: tuple[Piece, ...]


def stretches(pieces: Sequence[Piece]) -> list[Stretch]:
    """Cut the layers of a pass into groups, each of which is one graph.

    Args:
        pieces: the pieces of the whole pass; the first and the last are not layers.
    """
    found = []
    for k in range(1, len(pieces) - 1, GROUP):
        group = tuple(pieces[k : min(k + GROUP, len(pieces) - 1)])
        found.append(Stretch(tuple(piece.key for piece in group), k, group))
    return found


def capture(recorder: Recorder, stretch: Stretch, run: Callable[[int, Tensor], Tensor], warm: set[Any]) -> None:
    """Capture some layers.

    Args:
        recorder: captures the layers.
        stretch: the layers.
        run: runs a piece: its number, hidden states before → after.
        warm: keys of pieces whose kernels are known to be compiled; others are run once before.
    """
    before, after = recorder.frame.carry(stretch.pieces[0].before), recorder.frame.carry(stretch.pieces[-1].after)
    for k, piece in enumerate(stretch.pieces, start=stretch.first):
        if piece.key not in warm:
            with recorder.tried():
                run(k, recorder.frame.carry(piece.before))
            warm.add(piece.key)
    with recorder.recorded(stretch.key):
        hidden = before
        for k, _ in enumerate(stretch.pieces, start=stretch.first):
            hidden = run(k, hidden)
        after.copy_(hidden)
