"""A step on streamed weights and its two bounds: copying the layers, and computing with them.

    step ≥ max(bytes that are copied / bandwidth of a copy, the same step without its copies)

The first does not depend on the batch, so the time per example falls as batches grow, until the second is
longer.  The weights are random: only their shapes affect the time.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from .. import model as models
from ..engine import Engine
from ..method import METHODS
from ..offload import Division, Offload, divide, shelve
from ..offload.streamed import Streamed
from ..quantise import Codes, quantised_layers, store_, stored_as
from . import host
from .batch import Pool
from .row import Row
from .step import Gauge, resident

WARM_UP_STEPS = 2
COPIED_LAYERS, COPY_ROUNDS = 8, 3
"""Layers that are copied to measure the bandwidth, and number of rounds; the fastest counts."""
LR = 1e-9
"""Too small to change the weights."""
SPREAD = 0.02
"""Standard deviation of the random weights."""
DRAWN = 1 << 24
"""Random integers that are drawn at a time; few, because the device may have little memory left."""


@dataclass(frozen=True, kw_only=True)
class StreamRow(Row):
    """A step on streamed weights.

    Args:
        offload: the place where the weights rest.
        memory_bytes: bytes that the device may use; None if there is no limit.
        tokens: packed tokens per batch.
        rows: passes over the layers per step.
        step_ms: median milliseconds per step.
        copy_ms: the bound of the copies: the bytes copied to the device, at the measured bandwidth.
        compute_ms: median milliseconds of the same steps, on the same blocks, without copies.
        of_bound: the larger of both bounds divided by ``step_ms``.
        example_ms: milliseconds per example.
        bandwidth: bytes per second, from where a layer rests to the device.
        bytes_in, bytes_out: bytes copied to and from the device per step.
        peak_bytes: peak memory of the device; None if the system does not report it.
    """

    offload: str
    memory_bytes: int | None
    tokens: int
    rows: float
    step_ms: float
    copy_ms: float
    compute_ms: float
    of_bound: float
    example_ms: float
    bandwidth: float
    bytes_in: int
    bytes_out: int
    peak_bytes: int | None
    command: ClassVar[str] = "stream"


@torch.no_grad()
def shelved(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    to: Offload,
    memory: int | None,
    *,
    weights: str | None = None,
    tokens: int | None = None,
) -> tuple[nn.Module, Streamed, Division | None]:
    """A model with random weights on its shelf; they are drawn on the device, tensor by tensor, and copied there.

    Args:
        name: see :mod:`zeroblock.model`.
        dtype: the dtype of the weights.
        device: the device that computes.
        to: the place where the weights rest.
        memory: bytes of device memory to use.
        weights: the storage of the layers' matrices, see :func:`quantise.store_`.
        tokens: tokens of the longest row, see :func:`offload.divide`.
    """
    config = models.config(name)
    with torch.device("meta"):
        model: Any = models.auto_class(config).from_config(config, dtype=dtype)
    store_(model, weights)
    division = None if memory is None else divide(model, memory, tokens=tokens)
    model = model.to_empty(device="cpu").eval()  # memory that stays untouched until it is copied
    model.tie_weights()
    shelf = shelve(model, to, device=device, memory=division)
    assert isinstance(shelf, Streamed)
    for i, param in enumerate(model.parameters()):
        generator = torch.Generator(device).manual_seed(i)
        if isinstance(param, Codes):
            _draw_integers_(param, generator)
        else:
            drawn = torch.empty(param.shape, dtype=param.dtype, device=device)
            param.copy_(drawn.normal_(float(param.dim() < 2), SPREAD, generator=generator))
    for layer in quantised_layers(model).values():
        layer.scales.fill_(SPREAD * math.sqrt(3) / layer.kind.limit)  # integers are drawn uniformly
    for buffer in model.buffers():
        buffer.copy_(torch.zeros_like(buffer))
    return model, shelf, division


def _draw_integers_(codes: Codes, generator: torch.Generator) -> None:
    """Fill a matrix with random integers, some rows at a time."""
    rows = max(1, DRAWN // codes.shape[1])
    for some in codes.detach().split(rows):
        shape = some.shape[0], some.shape[1] * codes.per_byte
        drawn = torch.randint(
            -codes.limit, codes.limit + 1, shape, dtype=torch.int8, device=generator.device, generator=generator
        )
        some.view(torch.uint8).copy_(codes.packed(drawn).view(torch.uint8))


def measure(
    name: str,
    pools: Mapping[str, Pool],
    *,
    method: str = "mezo_bcd",
    dtype: torch.dtype = torch.float16,
    device: torch.device,
    offload: Offload = "host",
    memory: int | None = None,
    weights: str | None = None,
    tokens: int | None = None,
    batch_sizes: Sequence[int] = (16,),
    steps: int = 5,
) -> Iterator[StreamRow]:
    """Measure steps at several batch sizes.

    Args:
        name: the model whose shape is used.
        pools: the examples, by task.
        method: a method of the library.
        dtype: the dtype of the weights.
        device: the device that computes.
        offload: the place where the weights rest.
        memory: bytes of device memory to use.
        weights: ``int8`` or ``int4`` to store the layers' matrices as integers.
        tokens: tokens of the longest row; with a memory, the length to aim at.
        batch_sizes: examples per step, one row of the result for each.
        steps: number of timed steps.
    """
    idle = resident()
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())  # a memory limit needs an index
    if memory is not None and device.type == "cuda":  # what does not fit fails, and fragmentation counts
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory / torch.cuda.mem_get_info(device)[1]), device)
    model, shelf, division = shelved(name, dtype, device, offload, memory, weights=weights, tokens=tokens)
    rate = bandwidth(shelf)
    engine = Engine(model, max_tokens=tokens if division is None else division.tokens)
    vocabulary = models.config(name).vocab_size
    folded = {task: pool.folded(vocabulary) for task, pool in pools.items()}
    for (task, pool), size in itertools.product(folded.items(), batch_sizes):
        optimizer = METHODS[method](model, lr=LR)
        gauge = Gauge(device, idle)
        batches = [pool.batch(step, size) for step in range(WARM_UP_STEPS + steps)]
        objectives = [engine.objective(one.encoded, one.labels, one.over) for one in batches]
        _times(optimizer, objectives[:WARM_UP_STEPS], device)
        start = optimizer.state_dict()
        before = shelf.lane.bytes_in, shelf.lane.bytes_out
        step_ms = statistics.median(_times(optimizer, objectives[WARM_UP_STEPS:], device))
        copied = (shelf.lane.bytes_in - before[0]) // steps, (shelf.lane.bytes_out - before[1]) // steps
        gauge.read(0)
        optimizer.load_state_dict(start)
        with shelf.lane.still():
            compute_ms = statistics.median(_times(optimizer, objectives[WARM_UP_STEPS:], device))
        shelf.refresh()  # buffers do not hold the layers that they are marked with
        rows = statistics.fmean(len(one.rows) for one in objectives)
        copy_ms = 1e3 * copied[0] / rate
        yield StreamRow(
            model=name,
            task=task,
            method=method,
            device=device.type,
            dtype=stored_as(model),
            offload=offload,
            memory_bytes=memory,
            batch_size=size,
            tokens=int(statistics.fmean(one.tokens for one in batches)),
            rows=round(rows, 2),
            step_ms=round(step_ms, 2),
            copy_ms=round(copy_ms, 4),
            compute_ms=round(compute_ms, 2),
            of_bound=round(max(copy_ms, compute_ms) / step_ms, 3),
            example_ms=round(step_ms / size, 3),
            bandwidth=round(rate),
            bytes_in=copied[0],
            bytes_out=copied[1],
            peak_bytes=gauge.peak,
            **host.stamp(device.type),
        )


def bandwidth(shelf: Streamed) -> float:
    """Bytes per second of copies of resting layers into a buffer."""
    target = shelf.buffers[0]
    parts = [shelf.region.flat[slice(*layer.span)] for layer in shelf.layers[:COPIED_LAYERS]]
    best = 0.0
    for _ in range(COPY_ROUNDS):
        _wait(shelf.lane.device)
        begin = time.perf_counter()
        for part in parts:
            target.flat[: len(part)].copy_(part, non_blocking=True)
        _wait(shelf.lane.device)
        best = max(best, sum(map(len, parts)) / (time.perf_counter() - begin))
    shelf.refresh()  # the copies have overwritten a buffer
    return best


def _times(optimizer: Any, objectives: Sequence[Any], device: torch.device) -> list[float]:
    """Milliseconds of every step."""
    times = []
    for objective in objectives:
        begin = time.perf_counter()
        optimizer.step(objective)
        _wait(device)
        times.append(1e3 * (time.perf_counter() - begin))
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
