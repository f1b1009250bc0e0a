"""A step on the device as CUDA graphs: some forty launches instead of six hundred for a 13B model.

Where launching takes longer than running (short rows), the pieces of a step are captured: the
layers in groups, as they run before the active block, with it, and after it.  A step strings the
pieces of its block together.  So the number of graphs grows with the layers times the lengths of
rows, not with the square of the layers.  Kernels read tokens, step number and learning rate
from a buffer that one copy fills before every step.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..closure import evaluation
from ..errors import ZeroBlockWarning
from ..number import Numbers
from ..plan import Plan
from ..step import Staged
from .tape import Ends, FinishedError, Frame, Opening, Piece, Recorder, capture, stretches

MAX_CAPTURED_WORK = 1e13
"""Tokens × weights from which on a row keeps the device busy without a graph: about 800 tokens at 13B."""
MAX_GRAPH_BYTES = 1 << 30
"""Bytes of device memory that the graphs themselves may hold."""
MAX_GRAPHS = 8192
"""Maximum number of graphs at a time; drivers give small ones memory that is not reported."""
CUBLAS_BYTES = 1 << 25
"""Bytes that cuBLAS keeps on a stream of a recent GPU."""
CONTROLS = 5
"""Numbers before the batch in the buffer of inputs."""
MIN_INPUTS = 1 << 16
"""Minimum length of the buffer of inputs: rows of about ten thousand tokens."""
WARM = 4
"""Fields of a piece's key that say which kernels it launches, whatever the shape of the row."""
TOLERANCE = 1e-3
"""Allowed difference, relative to 1 + loss, between the losses of the first captured step and of a plain pass."""


class _Inputs(NamedTuple):
    """The numbers that captured kernels read, as views of one int64 buffer on the device."""

    flat: Tensor
    clock: Tensor
    """(2,) int64: the step, and the first step of its turn."""
    live: Tensor
    """(1,) int64: zero in a trial run, which moves nothing."""
    lr: Tensor
    """(1,) fp64."""
    amount: Tensor
    """(1,) fp64: how much the batch counts among those of all ranks."""
    batch: Tensor
    """(n,) int64: the objective's batch."""

    @classmethod
    def over(cls, flat: Tensor) -> _Inputs:
        clock, live, lr, amount, batch = flat.split([2, 1, 1, 1, len(flat) - CONTROLS])
        return cls(flat, clock, live, lr.view(torch.float64), amount.view(torch.float64), batch)

    @staticmethod
    def filled(plan: Plan, staged: Staged, live: bool) -> Tensor:
        """The numbers of a step in such a buffer on the host, pinned."""
        flat = torch.empty(len(staged.batch) + CONTROLS, dtype=torch.int64, pin_memory=True)
        whole = flat.numpy()  # sets single numbers ten times as fast as a tensor does
        whole[:3] = plan.turn.step, plan.turn.number * plan.weights.interval, live
        whole[3:CONTROLS].view(np.float64)[:] = plan.lr, plan.amount(staged.weight)
        whole[CONTROLS:] = staged.batch.numpy()
        return flat


class Graphs:
    """The captured steps of one optimizer at a time.

    Args:
        limit: bytes that the graphs themselves may hold; beyond it those of the least recently used shape are dropped.
        most: maximum number of graphs.
    """

    def __init__(self, limit: int = MAX_GRAPH_BYTES, most: int = MAX_GRAPHS) -> None:
        self.limit, self.most = limit, most
        self.shared = 0
        """Bytes of the memory that all graphs compute in, one at a time; it stays when a graph is dropped."""
        self.captures = 0
        """Number of graphs captured so far."""
        self.reason = ""
        """The reason why steps are not captured; empty while they are."""
        self.whole = False
        """Whether passes are captured in one piece although they can be cut, because the pieces gave other losses."""
        self._pool: torch.cuda.MemPool | None = None  # before the graphs, which it outlives
        self._frames: OrderedDict[tuple[object, ...], Frame] = OrderedDict()
        self._updates: dict[tuple[object, ...], torch.cuda.CUDAGraph] = {}
        self._numbers: dict[object, Numbers] = {}
        self._losses: dict[object, Tensor] = {}
        self._warm: set[tuple[object, ...]] = set()
        self._checked = False
        self._inputs: _Inputs | None = None
        self._stream: torch.cuda.Stream | None = None
        self._owner: object = None

    @staticmethod
    def pays(tokens: int, weights: int) -> bool:
        """Whether launching a row's kernels takes longer than running them."""
        return tokens * weights < MAX_CAPTURED_WORK

    @property
    def bytes(self) -> int:
        """Device memory that graphs hold and compute in."""
        return self.shared + self._own

    @property
    def _own(self) -> int:
        return sum(frame.bytes for frame in self._frames.values())

    def __len__(self) -> int:
        return sum(len(frame.graphs) for frame in self._frames.values()) + len(self._updates)

    def run(self, plan: Plan, staged: Staged) -> Numbers | None:
        """Take the step of a plan's block on an objective of this shape; pieces that are missing are captured first.

        Returns:
            The numbers, on the device; None, with nothing moved, if the step cannot be captured.
        """
        if self.reason or plan.estimator.anchored:  # an anchor has no fixed address
            return None
        with torch.cuda.device(staged.device):
            if plan.weights is not self._owner or self._inputs is None or len(self._inputs.batch) < len(staged.batch):
                self._start(plan, staged)
            assert self._inputs is not None
            plan.prepare()  # before the key, which the state's addresses are part of
            cast_to = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
            frame = self._frame((cast_to, *staged.row), staged)
            key = (*plan.memory, *staged.shape)
            string = frame.strings.get(key)
            if string is None:  # a known one builds no points: the device has them
                string = self._captured(plan, staged, frame) if len(plan.measured) <= staged.most else None
                if string is None:
                    return None
                frame.strings[key] = string
            numbers = self._numbers[plan.estimator]
            told = torch.empty_like(numbers.flat)  # allocate before the step, which is taken whole or not at all
            self._fill(plan, staged, live=True)
            for graph in string:
                graph.replay()
            return numbers.like(told.copy_(numbers.flat))

    def _start(self, plan: Plan, staged: Staged) -> None:
        """Begin anew, with another optimizer or a longer buffer of inputs."""
        torch.cuda.synchronize()  # no graph is dropped while it runs
        self._frames.clear()
        self._updates.clear()
        self._numbers.clear()
        self._losses.clear()
        self._warm.clear()
        self._pool, self.shared, self._checked, self._owner = None, 0, False, plan.weights
        size = max(MIN_INPUTS, 2 * len(staged.batch) + CONTROLS)
        self._inputs = _Inputs.over(torch.zeros(size, dtype=torch.int64, device=staged.device))

    def _frame(self, key: tuple[object, ...], staged: Staged) -> Frame:
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = Frame(staged.device)
        self._frames.move_to_end(key)
        return frame

    def _fill(self, plan: Plan, staged: Staged, live: bool) -> None:
        assert self._inputs is not None
        filled = _Inputs.filled(plan, staged, live)
        self._inputs.flat[: len(filled)].copy_(filled, non_blocking=True)

    def _captured(self, plan: Plan, staged: Staged, frame: Frame) -> list[torch.cuda.CUDAGraph] | None:
        """The graphs of a step, in order; None if they cannot be captured."""
        device = staged.device
        if self._stream is None:  # one for all: memory of the pool is only reused on the stream that freed it
            self._stream = torch.cuda.Stream(device)
        before, free = torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[0]
        count = len(self)
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream), torch.no_grad(), evaluation(plan.weights.model):
                self._fill(plan, staged, live=False)  # trial runs move nothing
                pool = self._pool or self._reserve(staged.reserve(plan), device)
                string = _Capture(self, plan, staged, frame, pool).string()
        except Exception as error:  # models of any family may do something that cannot be captured
            self.reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            warnings.warn(
                f"steps of {type(plan.weights.model).__name__} cannot be captured as CUDA graphs and run one kernel "
                f"at a time ({self.reason})",
                ZeroBlockWarning,
                stacklevel=5,
            )
            return None
        finally:
            torch.cuda.current_stream().wait_stream(self._stream)
        after = torch.cuda.memory_reserved(device)
        self.captures += len(self) - count
        self.shared += after - before
        frame.bytes += max(0, free - torch.cuda.mem_get_info(device)[0] - (after - before))
        self._make_room()
        return string

    def _reserve(self, scratch: int, device: torch.device) -> torch.cuda.MemPool:
        """A memory pool that begins as one chunk, large enough for any block.

        Chunks requested on demand would have the sizes of one block, and the next block would add its own.
        """
        self._pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._pool, device):
            torch.empty(scratch + CUBLAS_BYTES, dtype=torch.uint8, device=device)
        return self._pool

    def _make_room(self) -> None:
        while len(self._frames) > 1 and (self._own > self.limit or len(self) > self.most):
            torch.cuda.synchronize()
            self._frames.popitem(last=False)


class _Capture:
    """One step while its missing graphs are captured."""

    def __init__(self, graphs: Graphs, plan: Plan, staged: Staged, frame: Frame, pool: torch.cuda.MemPool) -> None:
        assert graphs._inputs is not None
        self.graphs, self.frame, self.staged, self.inputs = graphs, frame, staged, graphs._inputs
        self.recorder = Recorder(frame, pool)
        self.objective = staged.bind(self.inputs.batch[: len(staged.batch)])
        self.memory, self.plan = plan.memory, plan.clocked(self.inputs.clock)
        points, probes = len(plan.points), plan.estimator.probes
        flat = torch.empty(1 + points + probes, dtype=torch.float64, device=staged.device)
        self.numbers = graphs._numbers.setdefault(plan.estimator, Numbers(flat, points))
        self.points = self.plan.measured
        self.losses = self.numbers.losses
        """(points,) the buffer for the losses of the pass; this rank's only, if there are others."""
        if plan.team is not None:
            own = torch.empty(len(self.points), dtype=torch.float64, device=staged.device)
            self.losses = graphs._losses.setdefault(plan.estimator, own)

    def string(self) -> list[torch.cuda.CUDAGraph]:
        """Capture the missing graphs; return all graphs of the step, in order."""
        with self.recorder.saved():
            gather = [] if self.plan.team is None else [self._gather()]
            return [*self._measuring(), *gather, self._update()]

    def _measuring(self) -> list[torch.cuda.CUDAGraph]:
        graphs, frame = self.graphs, self.frame
        pieces = self._pieces(1 if graphs.whole else self.staged.pieces)
        outside = {(), *(piece.key[:WARM] for piece in (pieces[0], pieces[-1]) if piece.active)}
        eager = None
        if not outside <= graphs._warm:  # kernels are compiled and libraries set up outside the capture
            with self.recorder.tried():
                eager = self.objective.losses(self.points).double()
                self._shape(eager, live=False)
            graphs._warm |= outside
        if len(pieces) == 1:
            self._whole(pieces[0])
            return [frame.graphs[pieces[0].key]]
        opening = self._opening()
        self._ends(pieces[0], pieces[-1])
        self._layers(pieces)
        keys = [stretch.key for stretch in stretches(pieces)]
        if pieces[0].active:
            keys.insert(0, pieces[0].key)
        string = [opening, *(frame.graphs[key] for key in [*keys, pieces[-1].key])]
        if eager is not None and not graphs._checked:
            for graph in string:
                graph.replay()
            graphs._checked = True
            if not bool(((self.losses - eager).abs() <= TOLERANCE * (1 + eager.abs())).all()):
                graphs.whole = True
                frame.graphs.clear()
                return self._measuring()
        return string

    def _pieces(self, count: int) -> list[Piece]:
        """The pieces of this step's pass, with everything that they depend on."""
        plan, rows = self.plan, len(self.points)
        active = self.staged.active(plan) if count > 1 else {0: plan.members}
        pieces, before = [], 1
        for k in range(count):
            mine = active.get(k, ())
            places = tuple((member.param.data_ptr(), *member.basis.memory()) for member in mine)
            after = rows if mine else before
            key: tuple[object, ...] = (k, before, plan.estimator if mine else None, places)
            assert len(key) == WARM
            if k == count - 1:  # the loss depends on what is scored, and on how many points there are
                key = (*key, plan.estimator, *self.staged.shape)
            pieces.append(Piece(key, bool(mine), before, after))
            before = after
        return pieces

    def _whole(self, piece: Piece) -> None:
        """Capture a pass that cannot be cut."""
        if piece.key not in self.frame.graphs:
            with self.recorder.recorded(piece.key):
                self._tell(self.objective.losses(self.points))

    def _opening(self) -> torch.cuda.CUDAGraph:
        """The first piece at the unperturbed weights, which also computes the arguments of all layers for a row."""
        frame, key = self.frame, (0, 1, None, ())
        if key not in frame.graphs:
            tape = Opening(self.recorder)
            with self.recorder.tried(), contextlib.suppress(FinishedError):
                self.objective.losses((), tape)
            frame.carry(1)
            self.recorder.begin(key)
            with contextlib.suppress(FinishedError):
                self.objective.losses((), tape)
        return frame.graphs[key]

    def _ends(self, first: Piece, last: Piece) -> None:
        """Capture the pieces before and after the layers, including the loss."""
        known = self.frame.graphs
        begins = first if first.active and first.key not in known else None
        ends = last if last.key not in known else None
        if begins is None and ends is None:
            return
        self.frame.carry(last.before)
        self.frame.carry(first.after)
        tape = Ends(self.recorder, begins, ends, parted=last.before > 1)
        with tape.unwanted, contextlib.suppress(FinishedError):
            self._tell(self.objective.losses(self.points, tape))
            self.recorder.end()

    def _layers(self, pieces: list[Piece]) -> None:
        """Capture layers as they run before the active block, in it, or after it."""
        missing = [stretch for stretch in stretches(pieces) if stretch.key not in self.frame.graphs]
        if not missing:
            return

        def run(k: int, hidden: Tensor) -> Tensor:
            piece = pieces[k]
            points = self.points if piece.active else ()
            return self.objective.layer(k - 1, hidden, self.frame.calls[k - 1], points, parted=piece.before > 1)

        with self.objective.layers():
            for stretch in missing:
                capture(self.recorder, stretch, run, self.graphs._warm)

    def _tell(self, losses: Tensor) -> None:
        """Write the losses of a pass to where the next graph reads them."""
        if self.plan.team is None:
            self._shape(losses, live=True)
        else:
            self.losses.copy_(losses)

    def _shape(self, losses: Tensor, live: bool) -> None:
        """Turn the losses of this rank into the numbers of the step; without ``live`` send nothing."""
        gathered = self.plan.gather_on_device(losses, self.inputs.amount, live)
        self.plan.shape(gathered, self.numbers.flat)

    def _gather(self) -> torch.cuda.CUDAGraph:
        """The graph that sends a step's message.  Capture sends nothing: other ranks may have their graphs already."""
        key: tuple[object, ...] = ("gather", self.plan.estimator)
        graph = self.graphs._updates.get(key)
        if graph is None:
            self._shape(self.losses, live=False)
            with self.recorder.recorded(key):
                self._shape(self.losses, live=True)
            graph = self.graphs._updates[key] = self.frame.graphs.pop(key)
        return graph

    def _update(self) -> torch.cuda.CUDAGraph:
        graph = self.graphs._updates.get(self.memory)
        if graph is None:
            with self.recorder.tried():
                self._move()
            with self.recorder.recorded(self.memory):
                self._move()
            graph = self.graphs._updates[self.memory] = self.frame.graphs.pop(self.memory)
        return graph

    def _move(self) -> None:
        self.plan.update_on_device(self.numbers.coeffs, self.inputs.lr, self.inputs.live)
