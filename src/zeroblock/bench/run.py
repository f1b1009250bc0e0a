"""A run as a user has it: shuffled batches, packing, compilation, captures and the journal included."""

from __future__ import annotations

import gc
import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from ..journal.header import Header
from ..journal.writer import Journal
from ..quantise import stored_as
from ..train.batch import Batches
from . import host, variant
from .batch import Batch, Pool
from .row import Row
from .step import BASELINE, Gauge
from .variant import Choice

MILESTONES = (25, 100, 200, 1000, 3000)
"""Steps after which the clock is read."""
REFERENCE_STEPS = 24
"""Timed steps of MeZO's own procedure, after the same number of warm-up steps; it needs no more."""
MEMORY_STEPS = 20
"""Steps after the run over which peak memory is read again."""
STEADY_SHARE = 1 / 3
"""The last part of a run, whose mean counts as its steady state."""


@dataclass(frozen=True, kw_only=True)
class RunRow(Row):
    """The time of a run of one method.

    Args:
        steps: number of steps.
        set_up_s: seconds for the engine's trial of the model, before the first step.
        to_25_s, to_100_s, to_200_s, to_1000_s, to_3000_s: seconds from the start of the run to the end of that
            step; None if the run is shorter.
        mean_ms: milliseconds per step of the whole run.
        steady_ms: milliseconds per step of its last third.
        reference_ms: milliseconds per step of ``mezo-reference`` on the same batches; None if it was left out.
        ratio: ratio of ``reference_ms`` to ``mean_ms``.
        steady_ratio: ratio of ``reference_ms`` to ``steady_ms``.
        captures: number of captured CUDA graphs.
        peak_bytes: peak memory, weights included; None if it could not be measured.
        weights_bytes: size of the weights alone.
    """

    steps: int
    set_up_s: float
    to_25_s: float | None
    to_100_s: float | None
    to_200_s: float | None
    to_1000_s: float | None
    to_3000_s: float | None
    mean_ms: float
    steady_ms: float
    reference_ms: float | None
    ratio: float | None
    steady_ratio: float | None
    captures: int
    peak_bytes: int | None
    weights_bytes: int
    command: ClassVar[str] = "run"


def reference_ms(model: nn.Module, pool: Pool, batch_size: int, seed: int = 0, steps: int = REFERENCE_STEPS) -> float:
    """Milliseconds per step of MeZO's own procedure on the batches that a run begins with."""
    procedure = variant.build(Choice(BASELINE, variant.REFERENCE), model, seed=seed)
    batches = [_batch(pool, batch_size, seed, step) for step in range(steps)]
    for _ in range(2):
        _wait(model)
        begin = time.perf_counter()
        for batch in batches:
            procedure.step(batch)
        _wait(model)
    return 1e3 * (time.perf_counter() - begin) / len(batches)


def measure(
    model: nn.Module,
    pool: Pool,
    method: str,
    steps: int,
    *,
    batch_size: int = 16,
    seed: int = 0,
    graphs: bool | None = None,
    names: tuple[str, str],
    reference: float | None = None,
    idle_bytes: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> RunRow:
    """Take the first steps of a run, and time them.

    Args:
        model: the model, on its device and in its dtype; steps barely move it.
        pool: the examples.
        method: a method of the library.
        steps: number of steps.
        batch_size: examples per step.
        seed: the seed of noise, order of blocks and order of examples.
        graphs: whether to use CUDA graphs; None lets the engine choose.
        names: names of model and task, for the row.
        reference: milliseconds per step of MeZO's own procedure, if measured.
        idle_bytes: bytes of memory that the process held before it loaded the model, on the CPU.
        tell: called with a line of progress now and then.
    """
    first = next(model.parameters())
    gauge = Gauge(first.device, idle_bytes)
    _wait(model)
    begin = time.perf_counter()
    ready = variant.build(Choice(method, "forked"), model, seed=seed, graphs=graphs)
    assert isinstance(ready, variant.Ours)
    _wait(model)
    set_up = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        header = Header.of(ready.optimizer)  # hashes the weights, which a run does once, before it starts
        with Journal.create(Path(folder) / "run.zbj", header) as journal:
            ready.optimizer.listener = journal.append
            graphs_of = ready.engine.graphs
            ends = _timed(ready, pool, batch_size, seed, steps, tell)
            # trial runs before captures use the graphs' shared memory, which must count once: first without it,
            gauge.read(0 if graphs_of is None else graphs_of.bytes - graphs_of.shared)
            for step in range(steps, steps + min(steps, MEMORY_STEPS)):
                ready.step(_batch(pool, batch_size, seed, step))
            ready.optimizer.flush()
            gauge.read(ready.held)  # then with all of it
    captures = 0 if graphs_of is None else graphs_of.captures
    tail = round(steps * (1 - STEADY_SHARE))
    mean, steady = 1e3 * ends[steps] / steps, 1e3 * (ends[steps] - ends[tail]) / (steps - tail)
    del ready
    gc.collect()
    return RunRow(
        model=names[0],
        task=names[1],
        method=method,
        device=first.device.type,
        dtype=stored_as(model),
        batch_size=batch_size,
        steps=steps,
        set_up_s=round(set_up, 3),
        **{f"to_{n}_s": round(ends[n], 3) if n in ends else None for n in MILESTONES},  # type: ignore[arg-type]
        mean_ms=round(mean, 3),
        steady_ms=round(steady, 3),
        reference_ms=None if reference is None else round(reference, 3),
        ratio=None if reference is None else round(reference / mean, 2),
        steady_ratio=None if reference is None else round(reference / steady, 2),
        captures=captures,
        peak_bytes=gauge.peak,
        weights_bytes=sum(p.nbytes for p in model.parameters()),
        **host.stamp(first.device.type),
    )


def _timed(
    ready: variant.Ours, pool: Pool, batch_size: int, seed: int, steps: int, tell: Callable[[str], None]
) -> dict[int, float]:
    """Seconds from the start to the end of some steps, including the last one."""
    read = {n for n in MILESTONES if n <= steps} | {round(steps * (1 - STEADY_SHARE)), steps}
    ends: dict[int, float] = {0: 0.0}
    begin = time.perf_counter()
    for step in itertools.count():
        if step in read:
            ready.optimizer.flush()
            ends[step] = time.perf_counter() - begin
            tell(f"step {step}: {ends[step]:.2f} s")
        if step == steps:
            return ends
        ready.step(_batch(pool, batch_size, seed, step))
    raise AssertionError


def _batch(pool: Pool, size: int, seed: int, step: int) -> Batch:
    chosen = Batches(len(pool.encoded), size, seed).at(step)
    return Batch(tuple(pool.encoded[i] for i in chosen), tuple(pool.labels[i] for i in chosen), pool.over)


def _wait(model: nn.Module) -> None:
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()
