"""A step on the device as a CUDA graph: one launch instead of some six hundred for a 13B model.

Where launching takes longer than running (short rows), the step of one block and one row
length is captured once.  Its kernels read tokens, step number and learning rate from a
buffer that one copy fills before every replay.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..errors import ZeroBlockWarning
from ..step import Numbers, Plan, Staged, evaluation

MAX_CAPTURED_WORK = 1e13
"""Tokens × weights from which a row keeps the device busy without a graph: some 800 tokens at 13B."""
MAX_GRAPH_BYTES = 1 << 30
"""Bytes of device memory that the graphs themselves may hold."""
MAX_GRAPHS = 2048
"""Graphs at a time; drivers give small ones memory that does not show."""
CUBLAS_BYTES = 1 << 25
"""Bytes that cuBLAS keeps on a stream of a recent GPU."""


class _Inputs(NamedTuple):
    """The numbers that a captured step reads, as views of one int64 buffer: on the host to fill it, on the device to
    read it."""

    flat: Tensor
    batch: Tensor
    """(n,) int64: the objective's batch."""
    clock: Tensor
    """(2,) int64: the step, and the first step of its turn."""
    live: Tensor
    """(1,) int64: zero in a trial run, which moves nothing."""
    lr: Tensor
    """(1,) fp64."""

    @classmethod
    def over(cls, flat: Tensor) -> _Inputs:
        batch, clock, live, lr = flat.split([len(flat) - 4, 2, 1, 1])
        return cls(flat, batch, clock, live, lr.view(torch.float64))

    @classmethod
    def of(cls, plan: Plan, batch: Tensor) -> _Inputs:
        """Filled on the host, pinned."""
        inputs = cls.over(torch.empty(len(batch) + 4, dtype=torch.int64, pin_memory=True))
        inputs.batch.copy_(batch)
        inputs.clock.copy_(torch.tensor([plan.turn.step, plan.turn.number * plan.weights.interval]))
        inputs.live.fill_(1)
        inputs.lr.fill_(plan.lr)
        return inputs


class _Captured(NamedTuple):
    """A graph with the memory it computes in, reads and writes; ``bytes`` are those of the graph itself."""

    pool: torch.cuda.MemPool  # first, because a tuple releases its last member first: a pool outlives its graphs
    graph: torch.cuda.CUDAGraph
    inputs: _Inputs
    numbers: Numbers
    bytes: int


class Graphs:
    """The captured steps of one optimizer at a time, least recently used first.

    Args:
        limit: bytes that the graphs themselves may hold; beyond it the least recently used is dropped.
        most: how many there may be.
    """

    def __init__(self, limit: int = MAX_GRAPH_BYTES, most: int = MAX_GRAPHS) -> None:
        self.limit, self.most = limit, most
        self.shared = 0
        """Bytes of the memory that all graphs compute in, one at a time; it stays when a graph is dropped."""
        self.captures = 0
        """How many steps were captured so far."""
        self.reason = ""
        """Why steps are not captured; empty where they are."""
        self._steps: OrderedDict[tuple[object, ...], _Captured] = OrderedDict()
        self._warm: set[tuple[object, ...]] = set()
        self._pool: torch.cuda.MemPool | None = None
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
        return sum(captured.bytes for captured in self._steps.values())

    def __len__(self) -> int:
        return len(self._steps)

    def run(self, plan: Plan, staged: Staged) -> Numbers | None:
        """Replay the step of a plan's block on an objective of this shape, captured first if need be.

        Returns:
            The numbers, on the device; None, and nothing moved, where the step cannot be captured.
        """
        if self.reason:
            return None
        with torch.cuda.device(staged.device):
            if plan.weights is not self._owner:
                torch.cuda.synchronize()  # no graph is dropped while it runs
                self._steps.clear()
                self._pool, self.shared = None, 0
                self._owner = plan.weights
            plan.prepare()  # before the key, which the state's addresses are part of
            inputs = _Inputs.of(plan, staged.batch)
            cast_to = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
            kernels = (cast_to, *plan.memory)
            key = (*kernels, *staged.shape)
            captured = self._steps.get(key)
            if captured is None:
                captured = self._capture(plan, staged, inputs, kernels)
                if captured is None:
                    return None
                self._keep(key, captured)
            else:
                self._steps.move_to_end(key)
            told = torch.empty_like(captured.numbers.flat)  # before the step, which is taken whole or not at all
            captured.inputs.flat.copy_(inputs.flat, non_blocking=True)
            captured.graph.replay()
            return captured.numbers.like(told.copy_(captured.numbers.flat))

    def _capture(self, plan: Plan, staged: Staged, host: _Inputs, kernels: tuple[object, ...]) -> _Captured | None:
        device = staged.device
        inputs = _Inputs.over(host.flat.to(device))
        inputs.live.zero_()  # the trial run before the capture moves nothing
        losses, plan = staged.bind(inputs.batch), plan.clocked(inputs.clock)
        points, probes = plan.points, plan.estimator.probes
        numbers = Numbers(torch.empty(1 + len(points) + probes, dtype=torch.float64, device=device), len(points))

        def step() -> None:
            shaped = plan.shape(plan.gather(losses(points)))
            numbers.flat.copy_(shaped.flat)
            plan.update_on_device(shaped.coeffs, inputs.lr, inputs.live)

        if self._stream is None:  # one for all: memory of the pool is only reused on the stream that freed it
            self._stream = torch.cuda.Stream(device)
        stream, graph, before = self._stream, torch.cuda.CUDAGraph(), torch.cuda.memory_reserved(device)
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream), torch.no_grad(), evaluation(plan.weights.model):
                pool = self._pool or self._reserve(staged.reserve(plan), device)
                if kernels not in self._warm:  # kernels are compiled and libraries set up outside the capture
                    with torch.cuda.use_mem_pool(pool, device):
                        step()
                    self._warm.add(kernels)
                stream.synchronize()
                free, reserved = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
                graph.capture_begin(pool=cast(Any, pool.id), capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
        except Exception as error:  # models of any family may do something that cannot be captured
            self.reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            warnings.warn(
                f"steps of {type(plan.weights.model).__name__} cannot be captured as CUDA graphs and run one kernel "
                f"at a time ({self.reason})",
                ZeroBlockWarning,
                stacklevel=5,
            )
            return None
        torch.cuda.current_stream().wait_stream(stream)
        self.captures += 1
        after = torch.cuda.memory_reserved(device)
        self.shared += after - before
        own = free - torch.cuda.mem_get_info(device)[0] - (after - reserved)
        return _Captured(pool, graph, inputs, numbers, max(0, own))

    def _reserve(self, scratch: int, device: torch.device) -> torch.cuda.MemPool:
        """A pool that begins as one piece, large enough for any block.

        Pieces that are requested as they come up have the sizes of one block, and the next block adds its own.
        """
        self._pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._pool, device):
            torch.empty(scratch + CUBLAS_BYTES, dtype=torch.uint8, device=device)
        return self._pool

    def _keep(self, key: tuple[object, ...], captured: _Captured) -> None:
        self._steps[key] = captured
        while len(self._steps) > 1 and (self._own > self.limit or len(self._steps) > self.most):
            torch.cuda.synchronize()
            self._steps.popitem(last=False)
