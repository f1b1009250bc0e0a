"""Steps on the device alone: forward, coefficient and update, of which nothing has to come back to the host.

The coefficient that the kernels compute is the one the update uses, so the host can be
packing the next batch.  Where launching takes longer than running (small rows: some six
hundred kernels for a 13B model) the step of one block and one row length is captured as a
CUDA graph, whose kernels read tokens, step number and learning rate from a buffer that is
filled by one copy before it is replayed.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from ..errors import ZeroBlockWarning
from ..estimator import Finite
from .fork import scratch
from .pack import Row

if TYPE_CHECKING:
    from ..direction import Point
    from ..optimizer import ZeroOrder
    from .engine import Engine, Objective

WORK = 1e13
"""Tokens × weights from which a row keeps the device busy without a graph: some 800 tokens at 13B."""
LIMIT = 1 << 30
"""Bytes of device memory that the graphs themselves may hold."""

MOST = 2048
"""Graphs at a time."""

WORKSPACE = 1 << 25
"""Bytes that cuBLAS keeps on a stream of a recent GPU."""


def launch(optimizer: ZeroOrder, objective: Objective) -> Tensor | None:
    """The step of this optimizer's block on this objective, kernel by kernel; the host need not wait for any.

    Returns:
        As :meth:`Graphs.step`; None, and nothing moved, where the objective cannot be forked.
    """
    from ..optimizer import evaluation

    estimator = cast(Finite, optimizer.estimator)
    if not objective.engine.forked:
        return None
    points = estimator.points([optimizer.direction(probe) for probe in range(estimator.probes)])
    with torch.no_grad(), evaluation(optimizer.model):
        try:
            losses = objective.losses(points)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the objective will say why, when it is measured at these points
            return None
        rate = torch.tensor([float(optimizer.param_groups[0]["lr"]), 1.0], dtype=torch.float64)
        lr, live = rate.pin_memory().to(losses.device, non_blocking=True).split(1)
        return _move(optimizer, losses, lr, live)


def _move(optimizer: ZeroOrder, losses: Tensor, lr: Tensor, live: Tensor) -> Tensor:
    """From the losses to the weights, on the device: what is to be known of the step."""
    estimator, losses = cast(Finite, optimizer.estimator), losses.double()
    coeffs = estimator.coeffs(losses)
    numbers = torch.cat([estimator.loss(losses)[None], losses, coeffs.double()])
    optimizer.move(coeffs, lr, live)  # last: what fails before it has moved nothing
    return numbers


class _Captured(NamedTuple):
    """A graph, what it computes in, reads and writes; the bytes are those of the graph itself."""

    pool: torch.cuda.MemPool  # first, for a tuple lets go of its last member first: a pool outlives its graphs
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    numbers: Tensor
    bytes: int


class Graphs:
    """The captured steps of one optimizer at a time, least recently used first.

    Args:
        limit: bytes that the graphs themselves may hold; beyond, the least recently used is dropped.
        most: how many there may be; drivers give small ones memory that does not show.
    """

    def __init__(self, limit: int = LIMIT, most: int = MOST) -> None:
        self.limit, self.most = limit, most
        self.shared = 0
        """Bytes of the memory that all of them compute in, one at a time; it stays when one is dropped."""
        self.captures = 0
        """How many were captured so far."""
        self.why = ""
        """Why steps are not captured; empty where they are."""
        self._steps: OrderedDict[tuple[object, ...], _Captured] = OrderedDict()
        self._warm: set[tuple[object, ...]] = set()
        self._pool: torch.cuda.MemPool | None = None
        self._stream: torch.cuda.Stream | None = None
        self._owner: ZeroOrder | None = None

    @staticmethod
    def pays(tokens: int, weights: int) -> bool:
        """Whether launching a row's kernels takes longer than running them."""
        return tokens * weights < WORK

    @property
    def bytes(self) -> int:
        """Device memory they hold, and compute in."""
        return self.shared + self._own

    @property
    def _own(self) -> int:
        return sum(captured.bytes for captured in self._steps.values())

    def __len__(self) -> int:
        return len(self._steps)

    def step(self, optimizer: ZeroOrder, objective: Objective) -> Tensor | None:
        """Replay the step of this optimizer's block on this objective, captured before if need be.

        Returns:
            (1 + points + probes,) in fp64 on the device: the loss, the losses, the coefficients; None where the
            step cannot be captured.
        """
        if self.why or len(objective.rows) != 1:
            return None
        row, labels = objective.rows[0]
        if not isinstance(row, Row) or not self.pays(len(row.tokens), objective.engine.weights):
            return None
        lr = float(optimizer.param_groups[0]["lr"])
        turn = optimizer.steps // optimizer.interval * optimizer.interval
        last = torch.tensor([lr], dtype=torch.float64).view(torch.int64)
        host = torch.cat([row.flat(), labels, torch.tensor([optimizer.steps, turn, 1]), last]).pin_memory()
        if optimizer is not self._owner:
            torch.cuda.synchronize(objective.engine.device)  # none is dropped while it runs
            self._steps.clear()
            self._pool, self.shared = None, 0
            self._owner = optimizer
        cast_to = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        what = (optimizer.estimator, optimizer.block, cast_to, *optimizer.places())
        key = (*what, row.shapes, objective.over)
        captured = self._steps.get(key)
        if captured is None:
            captured = self._capture(optimizer, objective, row, labels, host, what)
            if captured is None:
                return None
            self._keep(key, captured)
        else:
            self._steps.move_to_end(key)
        told = torch.empty_like(captured.numbers)  # before the step, which is taken whole or not at all
        captured.inputs.copy_(host, non_blocking=True)
        captured.graph.replay()
        return told.copy_(captured.numbers)

    def _capture(
        self,
        optimizer: ZeroOrder,
        objective: Objective,
        row: Row,
        labels: Tensor,
        host: Tensor,
        what: tuple[object, ...],
    ) -> _Captured | None:
        from ..optimizer import evaluation
        from .engine import Objective

        engine = objective.engine
        estimator = cast(Finite, optimizer.estimator)
        inputs = host.to(engine.device)
        inputs[-2] = 0  # not live: the trial run before the capture moves nothing
        size, examples = row.flat().numel(), len(labels)
        static = Objective(
            engine, [(row.view(inputs[:size]), inputs[size : size + examples])], objective.examples, objective.over
        )
        live, lr = inputs[-2:-1], inputs[-1:].view(torch.float64)

        def step() -> None:
            numbers.copy_(_move(optimizer, static.losses(points), lr, live))

        if self._stream is None:  # one for all: memory of the pool is only used again by the stream that freed it
            self._stream = torch.cuda.Stream(engine.device)
        stream, graph, before = self._stream, torch.cuda.CUDAGraph(), torch.cuda.memory_reserved(engine.device)
        stream.wait_stream(torch.cuda.current_stream())
        members = optimizer.members
        try:
            optimizer.clock = inputs[-4:-2]  # kernels read their steps there when the graph is replayed
            optimizer.members = optimizer.members_of(optimizer.block)
            points = estimator.points([optimizer.direction(probe) for probe in range(estimator.probes)])
            numbers = torch.empty(1 + len(points) + estimator.probes, dtype=torch.float64, device=engine.device)
            with torch.cuda.stream(stream), torch.no_grad(), evaluation(optimizer.model):
                pool = self._pool or self._reserve(optimizer, engine, points, len(row.tokens))
                if what not in self._warm:  # kernels are compiled and libraries set up outside the capture
                    with torch.cuda.use_mem_pool(pool, engine.device):
                        step()
                    self._warm.add(what)
                stream.synchronize()
                free, reserved = torch.cuda.mem_get_info(engine.device)[0], torch.cuda.memory_reserved(engine.device)
                graph.capture_begin(pool=cast(Any, pool.id), capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
        except Exception as error:  # whatever a model of any family does that cannot be captured
            self.why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            warnings.warn(
                f"steps of {type(optimizer.model).__name__} cannot be captured as CUDA graphs and run one kernel at a "
                f"time ({self.why})",
                ZeroBlockWarning,
                stacklevel=6,
            )
            return None
        finally:
            optimizer.clock, optimizer.members = None, members
        torch.cuda.current_stream().wait_stream(stream)
        self.captures += 1
        after = torch.cuda.memory_reserved(engine.device)
        self.shared += after - before
        own = free - torch.cuda.mem_get_info(engine.device)[0] - (after - reserved)
        return _Captured(pool, graph, inputs, numbers, max(0, own))

    def _reserve(
        self, optimizer: ZeroOrder, engine: Engine, points: Sequence[Point], tokens: int
    ) -> torch.cuda.MemPool:
        """A pool that begins as one piece with room for any block's copies and what a layer computes beside them.

        Pieces that are asked for as they come up have the sizes of one block, and the next block adds its own.
        """
        params, inside = optimizer.params, engine.anatomy.layer
        widest = max((max(params[name].shape, default=1) for name in inside if name in params), default=1)
        beside = 4 * tokens * widest * engine.dtype.itemsize  # its widest product, in and out of the activation
        self._pool = torch.cuda.MemPool()
        blocks = (optimizer.members_of(block) for block in range(len(optimizer.blocks)))
        room = scratch(engine.anatomy, blocks, points, tokens)
        with torch.cuda.use_mem_pool(self._pool, engine.device):
            torch.empty(room + WORKSPACE + beside, dtype=torch.uint8, device=engine.device)
        return self._pool

    def _keep(self, key: tuple[object, ...], captured: _Captured) -> None:
        self._steps[key] = captured
        while len(self._steps) > 1 and (self._own > self.limit or len(self._steps) > self.most):
            torch.cuda.synchronize(captured.inputs.device)
            self._steps.popitem(last=False)
