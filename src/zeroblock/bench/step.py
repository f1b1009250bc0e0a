"""Time and memory of a step, one variant after the other, on the same examples in the same order."""

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
from ..engine.anatomy import ForkError
from ..errors import ZeroBlockError, ZeroBlockWarning
from . import host, variant
from .batch import Batch, Load, Pool
from .ceiling import Ceiling
from .row import BenchRow
from .variant import Choice, Variant

BASELINE = "mezo-reference"
"""The variant that every ratio is relative to."""
MIN_STEPS = 20
"""The median of fewer steps says little."""
WARMUP_STEPS = 3


@dataclass(frozen=True)
class Sampling:
    """The steps to measure.

    Args:
        batch_size: examples per step.
        steps: minimum number of steps. It is rounded up to whole cycles of layers, for methods without blocks
            too, so that all variants see the same batches.
        quick: take exactly ``steps`` steps: no whole cycles, a short warm-up, and fewer than 20 are allowed.
        warmup: number of steps before the clock starts. By default a whole cycle and at least 3; on a GPU
            the same steps as are then measured, so that no measured step is captured or meets a length for
            the first time: this happens only once in a run of thousands of steps.
        seed: the seed of the noise and of the order of blocks.
        max_tokens, graphs, interval: see :func:`variant.build`.
    """

    batch_size: int = 16
    steps: int = MIN_STEPS
    quick: bool = False
    warmup: int | None = None
    seed: int = 0
    max_tokens: int | None = None
    graphs: bool | None = None
    interval: int | None = None

    def __post_init__(self) -> None:
        if self.steps < MIN_STEPS and not self.quick:
            raise ZeroBlockError(f"{self.steps} steps say little: give at least {MIN_STEPS}, or --quick for a look")

    def distinct(self, blocks: int) -> int:
        """Number of different batches; every variant sees each of them equally often.

        Args:
            blocks: number of blocks: the layers, and the modules before and after them.
        """
        return self.steps if self.quick else -(-self.steps // blocks) * blocks

    def lengths(self, cycle: int, blocks: int, thorough: bool) -> tuple[int, int]:
        """Number of steps of the warm-up and of the measurement.

        Args:
            cycle: number of steps in which every block has its turn.
            blocks: see :meth:`distinct`.
            thorough: whether the first occurrence of a step is slower than the following ones.
        """
        distinct = self.distinct(blocks)
        steps = distinct if self.quick else math.lcm(distinct, cycle)
        usual = steps if thorough else WARMUP_STEPS if self.quick else max(WARMUP_STEPS, cycle)
        return (usual if self.warmup is None else self.warmup), steps


def measure(
    model: nn.Module,
    pool: Pool,
    choices: Sequence[Choice],
    sampling: Sampling,
    *,
    names: tuple[str, str],
    idle_bytes: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[BenchRow]:
    """Measure every variant; yield each measurement as soon as it is done.

    Args:
        model: the model, on its device and in its dtype.
        pool: the examples.
        choices: the variants, published ones first.
        sampling: the steps to measure.
        names: names of model and task, for the rows.
        idle_bytes: bytes of memory that the process held before it loaded the model, on the CPU.
        tell: called with a line of progress now and then.
    """
    device = next(model.parameters()).device
    ceiling = Ceiling(model)
    blocks = _blocks(model)
    reference: BenchRow | None = None
    for choice in choices:
        with _fresh(device):
            try:
                ready = variant.build(
                    choice,
                    model,
                    seed=sampling.seed,
                    max_tokens=sampling.max_tokens,
                    graphs=sampling.graphs,
                    interval=sampling.interval,
                )
            except ForkError as error:
                warnings.warn(f"{choice} is left out: {error}", ZeroBlockWarning, stacklevel=2)
                continue
            sample = _sample(ready, pool, sampling, blocks, device, idle_bytes, functools.partial(_say, tell, choice))
            row = _row(ready, choice, model, sampling, ceiling, names, sample, reference)
            del ready
        if choice.method == BASELINE:
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
    """The measured steps of a variant.

    Args:
        times: milliseconds of every step.
        peak: peak memory in bytes, weights included; None if it could not be measured.
        load: average sizes of the batches.
    """

    times: list[float]
    peak: int | None
    load: Load


def _sample(
    ready: Variant,
    pool: Pool,
    sampling: Sampling,
    blocks: int,
    device: torch.device,
    idle_bytes: int,
    tell: Callable[[str], None],
) -> Sample:
    thorough = ready.captures or (device.type == "cuda" and not sampling.quick)
    warmup, steps = sampling.lengths(ready.cycle, blocks, thorough)
    tell(f"{warmup} steps to warm up, {steps} measured")
    seen = sampling.distinct(blocks)
    batches = [pool.batch(step % seen, sampling.batch_size) for step in range(max(warmup, steps))]
    _clear(device)
    gauge = Gauge(device, idle_bytes)
    for batch in batches[:warmup]:
        ready.step(batch)
    ready.rewind(steps)
    gauge.read(0)
    times = _times(ready, batches[:steps], device)
    gauge.read(ready.held)
    tell(f"{statistics.mean(times):.1f} ms per step")
    return Sample(times, gauge.peak, Load.of(batches[:steps]))


class Gauge:
    """Peak memory, weights included.

    Args:
        device: the model's device.
        idle_bytes: bytes that the process held before it loaded the model; they are not counted.
    """

    def __init__(self, device: torch.device, idle_bytes: int = 0) -> None:
        self.device, self.idle_bytes = device, idle_bytes
        self.peak: int | None = None
        """The peak so far in bytes; None if it cannot be measured."""
        self._reset()

    def read(self, beside: int) -> None:
        """Take the peak since the last reading into account.

        Args:
            beside: bytes in use that the allocator does not count.
        """
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated()
        elif self._works:
            peak = resident("VmHWM") - self.idle_bytes
        else:
            return
        self.peak = max(self.peak or 0, peak + beside)
        self._reset()

    def _reset(self) -> None:
        self._works = True
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark of resident memory
        except OSError:
            self._works = False


def resident(field: str = "VmRSS") -> int:
    """Resident memory of this process in bytes, now or at its peak (``VmHWM``); 0 if the system does not report it."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


@contextlib.contextmanager
def _fresh(device: torch.device) -> Iterator[None]:
    """Free what a variant has allocated, so that the next one starts clean."""
    try:
        yield
    finally:
        gc.collect()
        _clear(device)


def _clear(device: torch.device) -> None:
    """Free unused memory; cuBLAS keeps 32 MiB for every stream that has run a product."""
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def _times(ready: Variant, batches: Sequence[Batch], device: torch.device) -> list[float]:
    """Milliseconds of every step, including the packing or padding of its examples.

    On a GPU, events mark the ends of steps, so that the measurement does not make a step wait for the
    host; the differences add up to the whole time.
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
    sampling: Sampling,
    ceiling: Ceiling,
    names: tuple[str, str],
    sample: Sample,
    reference: BenchRow | None,
) -> BenchRow:
    first = next(model.parameters())
    times, load = sample.times, sample.load
    fifths = statistics.quantiles(times, n=5, method="inclusive") if len(times) > 1 else times * 4
    mean, median = statistics.mean(times), statistics.median(times)
    base = (
        (reference.mean_ms, reference.median_ms) if reference else (mean, median) if choice.method == BASELINE else None
    )
    floor = ready.gemm_ms(ceiling, load)
    return BenchRow(
        model=names[0],
        task=names[1],
        method=choice.method,
        engine=choice.engine,
        device=first.device.type,
        dtype=str(first.dtype).removeprefix("torch."),
        batch_size=sampling.batch_size,
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
        **host.stamp(first.device.type),
    )
