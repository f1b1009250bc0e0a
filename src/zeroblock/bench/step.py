"""Time and memory of a step, variant by variant, on the same examples in the same order."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..block import layers
from ..engine.fork import ForkError
from ..errors import ZeroBlockError, ZeroBlockWarning
from . import record, variant
from .batch import Batch, Load, Pool
from .ceiling import Ceiling
from .record import Row
from .variant import Choice, Variant

BASE = "mezo-reference"
"""What ratios are to."""
FEWEST = 20
"""Steps below which a median says little."""
WARMUP = 3


@dataclass(frozen=True)
class Plan:
    """How to measure.

    Args:
        batch_size: examples a step.
        steps: at least; rounded up to whole cycles of layers, for methods without blocks too, so that all
            variants see the same batches.
        quick: takes ``steps`` at its word: no whole cycles, a short warm-up, fewer than 20 allowed.
        warmup: steps before the clock starts. Unless given, a whole cycle and at least 3; on a GPU the very
            steps that are measured, so that none of them captures one or meets a length for the first time: a
            run of thousands of steps does so but once.
        seed: of noise and order.
        max_tokens, graphs, interval: see :func:`variant.build`.
    """

    batch_size: int = 16
    steps: int = FEWEST
    quick: bool = False
    warmup: int | None = None
    seed: int = 0
    max_tokens: int | None = None
    graphs: bool | None = None
    interval: int | None = None

    def __post_init__(self) -> None:
        if self.steps < FEWEST and not self.quick:
            raise ZeroBlockError(f"{self.steps} steps say little: give at least {FEWEST}, or --quick for a look")

    def distinct(self, blocks: int) -> int:
        """Batches that every variant sees, each as often as the others.

        Args:
            blocks: layers of the model, and what lies before and after them.
        """
        return self.steps if self.quick else -(-self.steps // blocks) * blocks

    def lengths(self, cycle: int, blocks: int, thorough: bool) -> tuple[int, int]:
        """Steps of warm-up and of measurement.

        Args:
            cycle: steps until every block has had its turn.
            blocks: see :meth:`distinct`.
            thorough: whether what happens for the first time is slow.
        """
        distinct = self.distinct(blocks)
        steps = distinct if self.quick else math.lcm(distinct, cycle)
        usual = steps if thorough else WARMUP if self.quick else max(WARMUP, cycle)
        return (usual if self.warmup is None else self.warmup), steps


def measure(
    model: nn.Module,
    pool: Pool,
    choices: Sequence[Choice],
    plan: Plan,
    *,
    names: tuple[str, str],
    baseline: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[Row]:
    """A row for every variant, as soon as it is measured.

    Args:
        model: on its device, in its dtype.
        pool: the examples.
        choices: the variants, published ones first.
        plan: how.
        names: of model and task, for the rows.
        baseline: bytes the process held before the model, on the CPU.
        tell: hears what is going on.
    """
    device = next(model.parameters()).device
    ceiling = Ceiling(model)
    blocks = _blocks(model)
    reference: Row | None = None
    for choice in choices:
        with _fresh(device):
            try:
                ready = variant.build(
                    choice,
                    model,
                    seed=plan.seed,
                    max_tokens=plan.max_tokens,
                    graphs=plan.graphs,
                    interval=plan.interval,
                )
            except ForkError as error:
                warnings.warn(f"{choice} is left out: {error}", ZeroBlockWarning, stacklevel=2)
                continue
            sample = _sample(ready, pool, plan, blocks, device, baseline, functools.partial(_say, tell, choice))
            row = _row(ready, choice, model, plan, ceiling, names, sample, reference)
            del ready
        if choice.method == BASE:
            reference = row
        yield row


def _blocks(model: nn.Module) -> int:
    try:
        return len(layers(model))
    except ZeroBlockError:
        return 1


def _say(tell: Callable[[str], None], choice: Choice, text: str) -> None:
    tell(f"{choice}: {text}")


@dataclass(frozen=True)
class Sample:
    """What was measured of a variant.

    Args:
        times: milliseconds of every step.
        peak: bytes in use at most, weights included; None where it could not be measured.
        load: sizes of the steps' batches.
    """

    times: list[float]
    peak: int | None
    load: Load


def _sample(
    ready: Variant,
    pool: Pool,
    plan: Plan,
    blocks: int,
    device: torch.device,
    baseline: int,
    tell: Callable[[str], None],
) -> Sample:
    thorough = ready.captures or (device.type == "cuda" and not plan.quick)
    warmup, steps = plan.lengths(ready.cycle, blocks, thorough)
    tell(f"{warmup} steps to warm up, {steps} measured")
    seen = plan.distinct(blocks)
    batches = [pool.batch(step % seen, plan.batch_size) for step in range(max(warmup, steps))]
    _clear(device)
    gauge = Gauge(device, baseline)
    for batch in batches[:warmup]:
        ready.step(batch)
    ready.rewind(steps)
    gauge.read(0)
    times = _times(ready, batches[:steps], device)
    gauge.read(ready.held)
    tell(f"{statistics.mean(times):.1f} ms a step")
    return Sample(times, gauge.peak, Load.of(batches[:steps]))


class Gauge:
    """Peak memory, weights included.

    Args:
        device: of the model.
        baseline: bytes not to be counted: what the process held before there was a model.
    """

    def __init__(self, device: torch.device, baseline: int = 0) -> None:
        self.device, self.baseline = device, baseline
        self.peak: int | None = None
        """The most so far; None where it cannot be measured."""
        self._reset()

    def read(self, beside: int) -> None:
        """Note the peak since the last reading.

        Args:
            beside: bytes in use that the allocator knows nothing of.
        """
        if self.device.type == "cuda":
            found = torch.cuda.max_memory_allocated()
        elif self._works:
            found = resident("VmHWM") - self.baseline
        else:
            return
        self.peak = max(self.peak or 0, found + beside)
        self._reset()

    def _reset(self) -> None:
        self._works = True
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark of resident memory starts anew
        except OSError:
            self._works = False


def resident(what: str = "VmRSS") -> int:
    """Bytes of this process in memory, or the most there were (``VmHWM``); 0 where nobody says."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    return 0


@contextlib.contextmanager
def _fresh(device: torch.device) -> Iterator[None]:
    """Nothing left over from the variant before, nothing left for the next."""
    try:
        yield
    finally:
        gc.collect()
        _clear(device)


def _clear(device: torch.device) -> None:
    """Give back what nobody uses; cuBLAS keeps 32 MiB for every stream that has ever multiplied."""
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def _times(ready: Variant, batches: Sequence[Batch], device: torch.device) -> list[float]:
    """Milliseconds of every step, packing or padding of its examples included.

    On a GPU events mark the ends of steps, so that a step that need not wait for the host
    is not made to; the differences add up to the time of the whole.
    """
    if device.type != "cuda":
        ticks = [time.perf_counter()]
        for batch in batches:
            ready.step(batch)
            ticks.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in itertools.pairwise(ticks)]
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]
    marks[0].record()
    for batch, mark in zip(batches, marks[1:], strict=True):
        ready.step(batch)
        mark.record()
    torch.cuda.synchronize()
    return [float(a.elapsed_time(b)) for a, b in itertools.pairwise(marks)]


def _row(
    ready: Variant,
    choice: Choice,
    model: nn.Module,
    plan: Plan,
    ceiling: Ceiling,
    names: tuple[str, str],
    sample: Sample,
    reference: Row | None,
) -> Row:
    first = next(model.parameters())
    times, load = sample.times, sample.load
    fifths = statistics.quantiles(times, n=5, method="inclusive") if len(times) > 1 else times * 4
    mean, median = statistics.mean(times), statistics.median(times)
    base = (reference.mean_ms, reference.median_ms) if reference else (mean, median) if choice.method == BASE else None
    floor = ready.gemm_ms(ceiling, load)
    return Row(
        model=names[0],
        task=names[1],
        method=choice.method,
        engine=choice.engine,
        device=first.device.type,
        dtype=str(first.dtype).removeprefix("torch."),
        batch_size=plan.batch_size,
        steps=len(times),
        cycle=ready.cycle,
        median_ms=round(median, 4),
        q20_ms=round(fifths[0], 4),
        q80_ms=round(fifths[3], 4),
        mean_ms=round(mean, 4),
        peak_bytes=sample.peak,
        weights_bytes=sum(p.nbytes for p in model.parameters()),
        ratio_to_reference=None if base is None else round(base[0] / mean, 3),
        ratio_of_medians=None if base is None else round(base[1] / median, 3),
        gemm_floor_ms=None if floor is None else round(floor, 4),
        copy_floor_ms=round(ceiling.copy_ms(ready.copied()), 4),
        tokens=load.tokens,
        tokens_padded=load.padded,
        machine=record.machine(first.device.type),
        versions=record.versions(),
        date=record.today(),
    )
