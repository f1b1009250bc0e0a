"""A forward pass taken in pieces: each is captured once per shape of row, whichever block is active elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor


class FinishedError(Exception):
    """The rest of the pass is captured already."""


class Piece(NamedTuple):
    """What a piece of a pass does.

    Args:
        key: what its kernels depend on besides the shape of the row.
        active: whether it reads tensors of the active block.
        before: rows of its hidden states.
        after: rows of its result.
    """

    key: tuple[object, ...]
    active: bool
    before: int
    after: int


class Frame:
    """What the captured pieces of one shape of row share.

    Hidden states pass from piece to piece through one buffer per number of rows, and every layer is
    given the arguments that the first piece, captured for this frame, computes in their place.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graphs: dict[tuple[object, ...], torch.cuda.CUDAGraph] = {}
        self.strings: dict[tuple[object, ...], list[torch.cuda.CUDAGraph]] = {}
        """The graphs of a whole step, in order."""
        self.calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        """The arguments of every layer, without its hidden states."""
        self.hidden: Tensor | None = None
        """A tensor of the shape and dtype of the hidden states of one row, without memory."""
        self.bytes = 0
        """Device memory that the graphs themselves hold."""
        self._carries: dict[int, Tensor] = {}

    def carry(self, rows: int) -> Tensor:
        """(rows, S, width) the buffer that hidden states of so many rows pass through."""
        if rows not in self._carries:
            assert self.hidden is not None
            shape = (rows, *self.hidden.shape[1:])
            self._carries[rows] = torch.zeros(shape, dtype=self.hidden.dtype, device=self.device)
        return self._carries[rows]


class Tape:
    """Captures the missing pieces of a pass while the model's own forward runs; see :class:`step.Tape`.

    Args:
        frame: keeps the pieces.
        pieces: all of the pass, or the first alone: then layers are only asked for their arguments.
        last: number of the last piece.
        pool: memory that the pieces compute in.
        warm: keys of pieces whose kernels are known to be compiled; others are run once before they are captured.
    """

    def __init__(
        self,
        frame: Frame,
        pieces: Sequence[Piece],
        last: int,
        pool: torch.cuda.MemPool,
        warm: set[tuple[object, ...]],
    ) -> None:
        self.frame, self.pieces, self.last, self.pool, self.warm = frame, pieces, last, pool, warm
        self.missing = {k for k, piece in enumerate(pieces) if piece.key not in frame.graphs}
        self._open: tuple[Piece, torch.cuda.CUDAGraph] | None = None

    def arguments(
        self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.frame.calls.setdefault(layer, (args, kwargs))

    def cut(self, piece: int, hidden: Tensor) -> Tensor | None:
        if self.frame.hidden is None:
            self.frame.hidden = torch.empty_like(hidden, device="meta")
            self.frame.calls.clear()  # these arguments were not captured
            raise FinishedError
        self._close(hidden)
        if len(self.pieces) == 1 and piece < self.last:  # on to the next layer's arguments
            return None
        if not any(k >= piece for k in self.missing):
            raise FinishedError
        return self.frame.carry(self.pieces[piece].before) if piece in self.missing else None

    def after(self, piece: int) -> Tensor:
        return self.frame.carry(self.pieces[piece].after if len(self.pieces) > 1 else 1)

    def parts(self, piece: int) -> bool:
        return len(self.pieces) > 1 and self.pieces[piece].after > self.pieces[piece].before

    @contextlib.contextmanager
    def trying(self, piece: int) -> Iterator[bool]:
        key = self.pieces[piece].key
        needed = key not in self.warm
        with torch.cuda.use_mem_pool(self.pool, self.frame.device) if needed else contextlib.nullcontext():
            yield needed
        self.warm.add(key)

    def begin(self, piece: int) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=cast(Any, self.pool.id), capture_error_mode="thread_local")
        self._open = self.pieces[piece], graph

    def _close(self, hidden: Tensor) -> None:
        if self._open is not None:
            self.frame.carry(self._open[0].after).copy_(hidden)
            self.finish()

    def finish(self) -> None:
        """The piece that is being captured ends here."""
        if self._open is not None:
            (piece, graph), self._open = self._open, None
            graph.capture_end()
            self.frame.graphs[piece.key] = graph
            self.missing = {k for k in self.missing if self.pieces[k].key != piece.key}

    def abort(self) -> None:
        """Give up the piece that is being captured, if any."""
        if self._open is not None:
            (_, graph), self._open = self._open, None
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
