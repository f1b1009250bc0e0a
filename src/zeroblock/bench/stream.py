"""A step on streamed weights beside its two bounds: copying the layers, and computing with them.

    step ≥ max(bytes that are copied / bandwidth of a copy, the same step without its copies)

The first does not depend on the batch, so the time per example falls as batches grow, until the second is
longer.  Weights are random: only their shape matters to the time.
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
"""Layers that are copied to measure the bandwidth, and how often; the fastest round counts."""
LR = 1e-9
"""Too small to change the weights."""
SPREAD = 0.02
"""Standard deviation of the random weights."""
DRAWN = 1 << 24
"""Random integers that are drawn at a time: the device may have little memory left."""


@dataclass(frozen=True, kw_only=True)
class StreamRow(Row):
    """A step on streamed weights.

    Args:
        offload: where the weights rest.
        memory_bytes: that the device may use; None if nobody gave a limit.
        tokens: of a batch, packed.
        rows: passes over the layers per step.
        step_ms: median milliseconds per step.
        copy_ms: the bound of the copies: the bytes that come to the device, at the bandwidth.
        compute_ms: median milliseconds of the same steps, on the same blocks, without copies.
        of_bound: the larger of both bounds divided by ``step_ms``.
        example_ms: milliseconds per example.
        bandwidth: bytes per second, from where a layer rests to the device.
        bytes_in, bytes_out: copied per step.
        peak_bytes: of the device; None where the system does not say.
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
    """A model of random weights on its shelf; they are drawn on the device, tensor by tensor, where they belong.

    Args:
        name: see :mod:`zeroblock.model`.
        dtype: of the weights.
        device: where it computes.
        to: where the weights rest.
        memory: bytes of the device to use.
        weights: how the matrices of the layers are stored, see :func:`quantise.store_`.
        tokens: of the longest row, see :func:`offload.divide`.
    """
    config = models.config(name)
    with torch.device("meta"):
        model: Any = models.auto_class(config).from_config(config, dtype=dtype)
    store_(model, weights)
    division = None if memory is None else divide(model, memory, tokens=tokens)
    model = model.to_empty(device="cpu").eval()  # memory that nothing touches before it is copied
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
    """Fill a matrix of integers with random ones, some rows at a time."""
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
        name: of the model's shape.
        pools: the examples, by task.
        method: of zeroblock.
        dtype: of the weights.
        device: where it computes.
        offload: where the weights rest.
        memory: bytes of the device to use.
        weights: ``int8`` or ``int4`` where the layers' matrices are stored as integers.
        tokens: of the longest row that is wanted, where a memory is given.
        batch_sizes: examples per step, one row of the result for each.
        steps: that are timed.
    """
    idle = resident()
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())  # a limit wants it whole
    if memory is not None and device.type == "cuda":  # what does not fit fails, and fragments count
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
        shelf.refresh()  # buffers hold other layers than they say
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
    """Bytes per second of copies from where layers rest into a buffer."""
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
    shelf.refresh()  # a buffer holds something else now
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
