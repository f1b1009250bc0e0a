"""The step of every method, one after another on one model: time, memory, and why a method cannot run."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ..engine import Engine
from ..errors import ZeroBlockError
from ..method import get, specimen
from ..optimizer import ZeroOrder
from . import host
from .batch import Batch, Pool
from .row import Row
from .step import Gauge
from .variant import LR

MIN_STEPS = 3
MAX_WARM_UP_CYCLES = 4
SAMPLED_BATCHES = 20
"""The measured batch has the median length of this many."""


@dataclass(frozen=True, kw_only=True)
class MethodRow(Row):
    """The cost of a step of one method.

    Args:
        tokens: packed tokens of the batch.
        blocks: number of blocks that take turns; 1 if every weight moves at once.
        points: number of points at which a step measures the loss.
        captured: whether steps ran as CUDA graphs.
        steps: number of measured steps.
        mean_ms: mean time of a step; None if the method could not run.
        peak_bytes: peak memory, weights included.
        weights_bytes: size of the weights alone.
        error: the reason why the method could not run; empty if it could.
    """

    tokens: int
    blocks: int
    points: int
    captured: bool
    steps: int
    mean_ms: float | None
    peak_bytes: int | None
    weights_bytes: int
    error: str
    command: ClassVar[str] = "methods"


def measure(
    model: nn.Module,
    pool: Pool,
    methods: Sequence[str],
    *,
    names: tuple[str, str],
    batch_size: int = 16,
    seconds: float = 1.2,
    until: float = float("inf"),
    idle_bytes: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[MethodRow]:
    """Measure a step of every method on one batch; yield each row as soon as it is done.

    Steps run for ``seconds``, and to the end of the cycle of blocks if that is near.  They barely move the weights.

    Args:
        model: the model, on its device and in its dtype.
        pool: the examples.
        methods: their names.
        names: names of model and task, for the rows.
        batch_size: examples per step.
        seconds: seconds of measured steps per method.
        until: time after which no method begins, on the monotonic clock.
        idle_bytes: bytes of memory that the process held before it loaded the model, on the CPU.
        tell: called with a line per method.
    """
    batch = sorted((pool.batch(step, batch_size) for step in range(SAMPLED_BATCHES)), key=lambda one: one.tokens)[
        SAMPLED_BATCHES // 2
    ]
    first = next(model.parameters())
    for name in methods:
        plain = get(name)(specimen(), lr=LR)
        found: dict[str, object] = {"points": len(plain.plan().points), "blocks": 1}
        error = "no time was left to measure it" if time.monotonic() >= until else ""
        if not error:
            try:
                found |= _sample(model, name, batch, seconds, Gauge(first.device, idle_bytes))
            except (torch.OutOfMemoryError, MemoryError):
                error = "it does not fit in memory"
            except (ZeroBlockError, RuntimeError) as caught:
                error = " ".join(str(caught).split())[:200]
            gc.collect()
            if first.device.type == "cuda":
                torch.cuda.empty_cache()
        row = MethodRow(
            model=names[0], task=names[1], method=name, device=first.device.type,
            dtype=str(first.dtype).removeprefix("torch."), batch_size=batch_size, tokens=batch.tokens,
            weights_bytes=sum(p.nbytes for p in model.parameters()), error=error,
            **host.stamp(first.device.type),
            **{"captured": False, "steps": 0, "mean_ms": None, "peak_bytes": None, **found},  # type: ignore[arg-type]
        )  # fmt: skip
        tell(f"{name}: {error or f'{row.mean_ms:.2f} ms per step'}")
        yield row


def _sample(model: nn.Module, name: str, batch: Batch, seconds: float, gauge: Gauge) -> dict[str, object]:
    """Take the steps of a method; return the columns that follow from them."""
    plain = get(name)(specimen(), lr=LR)
    fold = {"fold": plain.interval} if plain.subspace.folds else {}  # as zeroblock train does
    optimizer, engine = get(name)(model, lr=LR, **fold), Engine(model)
    several = len(optimizer.blocks) > 1
    cycle = len(optimizer.blocks) * optimizer.interval if several else 1
    _warm_up(optimizer, engine, batch, seconds, cycle)
    gauge.read(0)
    taken, spent = _take(optimizer, engine, batch, seconds, cycle)
    gauge.read(engine.graphs.bytes if engine.graphs else 0)
    return {
        "blocks": len(optimizer.blocks),
        "captured": engine.graphs is not None and engine.graphs.captures > 0,
        "steps": taken,
        "mean_ms": round(1e3 * spent / taken, 4),
        "peak_bytes": gauge.peak,
    }


def _warm_up(optimizer: ZeroOrder, engine: Engine, batch: Batch, seconds: float, cycle: int) -> None:
    """Take steps until a cycle of blocks captures nothing new: some pieces are captured at their second use."""
    for _ in range(MAX_WARM_UP_CYCLES):
        captured = engine.graphs.captures if engine.graphs else 0
        _take(optimizer, engine, batch, seconds, cycle, stop=True)
        if not engine.graphs or engine.graphs.captures == captured:
            return


def _take(
    optimizer: ZeroOrder, engine: Engine, batch: Batch, seconds: float, cycle: int, stop: bool = False
) -> tuple[int, float]:
    """Take steps for ``seconds``, or up to twice as long to finish a cycle; return their number and their time.

    Args:
        optimizer: takes the steps.
        engine: the engine of the model.
        batch: the examples.
        seconds: see above.
        cycle: steps in which every block has its turn.
        stop: whether one cycle is enough.
    """
    begin, taken = time.perf_counter(), 0
    while True:
        parts = [engine.objective(batch.encoded, batch.labels, batch.over) for _ in range(max(1, optimizer.anchoring))]
        optimizer.step(parts[0] if len(parts) == 1 else parts)
        taken += 1
        now = time.perf_counter() - begin
        whole = taken % cycle == 0
        enough = taken >= MIN_STEPS
        if enough and ((stop and whole and cycle > 1) or (now >= seconds and (whole or now >= 2 * seconds))):
            break
    optimizer.flush()
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    return taken, time.perf_counter() - begin


def table(rows: Sequence[MethodRow]) -> list[str]:
    """The rows as lines of Markdown, the fastest first; the ratio is to ``mezo_bcd``.

    Args:
        rows: the rows of one model and task.
    """
    own = next((row.mean_ms for row in rows if row.method == "mezo_bcd" and row.mean_ms), None)
    lines = ["| method | blocks | points | captured | ms per step | × mezo_bcd | ms per point | peak / weights |"]
    lines += ["|---|---:|---:|---|---:|---:|---:|---:|"]
    for row in sorted(rows, key=lambda row: row.mean_ms or float("inf")):
        if row.mean_ms is None:
            lines.append(f"| {row.method} | {row.blocks} | {row.points} | | {row.error} | | | |")
            continue
        ratio = f"{row.mean_ms / own:.2f}" if own else ""
        peak = f"{row.peak_bytes / row.weights_bytes:.3f}" if row.peak_bytes else ""
        captured = "yes" if row.captured else "no"
        lines.append(
            f"| {row.method} | {row.blocks} | {row.points} | {captured} | {row.mean_ms:.1f} | {ratio} | "
            f"{row.mean_ms / row.points:.1f} | {peak} |"
        )
    return lines
