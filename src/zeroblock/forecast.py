"""The cost of a run before it starts: memory by method, and time from a few real steps on real batches.

The memory of a method is counted (see :mod:`zeroblock.bench.memory`), with an estimate of the activations:

    two points × tokens × (4·hidden + 3·intermediate)     of the widest layer
    two points × scored positions × vocabulary            of the logits, as computed and in fp32

The time is measured, because no formula knows a machine.  A model that does not fit is not loaded.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import model as models
from .bench.batch import Batch, Load, Pool, encode
from .bench.host import machine
from .bench.memory import Need, table
from .bench.step import Gauge, resident
from .errors import ZeroBlockError
from .offload import Division
from .quantise import elements, stored_bytes
from .task import get as get_task
from .train.batch import Batches
from .train.config import BACKPROPAGATION, Config
from .train.learner import ZerothOrder, learner
from .train.offloaded import divided
from .train.session import out_of_memory
from .train.workload import Workload, prepare, resolve

LR = 1e-9
"""Too small to change the weights, so that no measured step can diverge."""
DTYPES = {"cpu": "fp32", "cuda": "bf16"}
"""The default dtype of a run, by device type."""
WARMUP_STEPS, MIN_STEPS, MAX_STEPS = 2, 3, 200
EVALUATED = 16
"""Number of examples in the measured evaluation."""
SAMPLED_BATCHES = 64
"""Batches whose tokens are counted."""
MAX_GRAPHS = 2048
ADAM_COPIES = 4
"""Weights, gradients and two moments."""
HEADROOM = 0.95
"""Share of the free memory that a run may take."""


@dataclass(frozen=True)
class Memory:
    """Expected peak of a method, in bytes.

    Args:
        method: its name; ``ft`` is backpropagation with Adam.
        cpu: peak with fp32 weights.
        gpu: peak with 16-bit weights; ``ft`` keeps fp32.
    """

    method: str
    cpu: int
    gpu: int


@dataclass(frozen=True)
class Timing:
    """The times of measured steps.

    Args:
        steps: number of steps.
        step_s: mean seconds per step.
        error_s: standard error of that mean, as blocks and batches differ.
        capture_s: seconds that the captures of CUDA graphs will add to the whole run.
        evaluation_s: seconds of one evaluation of dev and test.
        peak_bytes: peak memory during the steps; None if the system does not report it.
    """

    steps: int
    step_s: float
    error_s: float
    capture_s: float
    evaluation_s: float
    peak_bytes: int | None


@dataclass(frozen=True)
class Forecast:
    """The expected memory and time of a run.

    Args:
        config: the resolved configuration.
        weights: number of weights.
        machine: the name of the machine.
        free_bytes: memory of the device that is free now; None if the system does not report it.
        expected_bytes: expected peak of the run.
        memory: expected peaks, by method.
        rows: number of examples, by split; empty if the data could not be read.
        load: the sizes of a batch.
        timing: the measured times; None for a model that was not loaded.
        reason: the reason why nothing was measured; empty if steps were measured.
        division: how the memory is divided, if weights are streamed or a memory is given.
        approximate: whether bytes of integers are those that ``--weights`` would make, because a checkpoint with
            integers of its own was not loaded.
    """

    config: Config
    weights: int
    machine: str
    free_bytes: int | None
    expected_bytes: int
    memory: tuple[Memory, ...]
    rows: dict[str, int]
    load: Load
    timing: Timing | None
    reason: str
    division: Division | None = None
    approximate: bool = False

    @property
    def peak_bytes(self) -> int:
        """The measured peak, or else the expected one."""
        measured = self.timing.peak_bytes if self.timing else None
        return measured or self.expected_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the run fits into the memory of the device; None if its free memory is unknown."""
        return None if self.free_bytes is None else self.expected_bytes <= HEADROOM * self.free_bytes

    @property
    def epochs(self) -> float | None:
        """How often the run sees every training example."""
        seen = self.config.steps * self.config.batch_size * self.config.accumulate
        return seen / self.rows["train"] if self.rows.get("train") and self.config.trains else None

    @property
    def evaluations(self) -> int:
        """Number of evaluations in the run."""
        return len(self.config.evaluations)

    @property
    def steps_s(self) -> float | None:
        """Seconds of all steps, captures included."""
        if self.timing is None:
            return None
        return self.timing.step_s * self.config.steps + self.timing.capture_s

    @property
    def evaluations_s(self) -> float | None:
        """Seconds of all evaluations."""
        return None if self.timing is None else self.timing.evaluation_s * self.evaluations

    def document(self) -> dict[str, Any]:
        """The forecast as plain values."""
        values = dataclasses.asdict(self)
        config = values.pop("config")
        kept = ("model", "task", "method", "device", "dtype", "steps", "batch_size", "accumulate")
        total = None if self.steps_s is None or self.evaluations_s is None else self.steps_s + self.evaluations_s
        more = {"fits": self.fits, "peak_bytes": self.peak_bytes, "epochs": self.epochs}
        more |= {"evaluations": self.evaluations, "steps_s": self.steps_s, "evaluations_s": self.evaluations_s}
        return {name: config[name] for name in kept} | values | more | {"run_s": total}


def forecast(config: Config, seconds: float = 10.0, tell: Callable[[str], None] = lambda text: None) -> Forecast:
    """Forecast the memory and time of a run.

    Args:
        config: the configuration of the run, with a method that trains.
        seconds: time to spend on measured steps.
        tell: called with a line about each stage.

    >>> forecast(Config(model="smollm2", task="reviews", lr=3e-4)).fits  # doctest: +SKIP
    True
    """
    if not config.trains:
        raise ZeroBlockError(f"{config.method} takes no steps, so there is nothing to plan: give a method that trains")
    config = resolve(config)
    device = models.find_device(config.device)
    remote = config.trust_remote_code
    skeleton: Any = models.skeleton(
        config.model, trust_remote_code=remote, adapter=config.adapter, weights=config.weights
    )
    free = free_memory(device)
    itemsize = models.DTYPES[config.dtype].itemsize
    weights = needed = stored_bytes(skeleton, itemsize)
    division = divided(config, skeleton)
    if config.offload is not None:
        needed = 0 if division is None else division.used
        host = free_memory(torch.device("cpu"))
        if config.offload == "host" and host is not None and weights > HEADROOM * host:
            raise ZeroBlockError(
                f"the weights take {weights / 1e9:.1f} GB, and {host / 1e9:.1f} GB of the host are free: --offload disk"
            )
    workload, reason, idle = None, "", resident()
    if free is not None and needed > HEADROOM * free:
        least = "the weights alone take" if config.offload is None else "the layers on the device and one row take"
        reason = f"{least} {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
    elif config.model in models.OPT and not config.random_weights:
        reason = f"{config.model} is a shape without weights: add --random-weights to measure its speed"
    if reason:
        pool, rows = _read(config, tell)
    else:
        with out_of_memory():
            workload = prepare(config, tell=tell)
        pool = Pool(*_unzipped(workload), workload.task.over)
        rows = {"train": len(workload.train)} | {name: len(exam.examples) for name, exam in workload.exams.items()}
    batches = _batches(config, pool)
    load = Load.of([_batch(pool, batches.at(step)) for step in range(SAMPLED_BATCHES)])
    given = config.weights is not None and models.is_stored_quantised(config.model, trust_remote_code=remote)
    if given and workload is not None:  # a checkpoint has groups and zero points of its own
        skeleton = workload.model
    memory = tuple(_memory(skeleton, load))
    chosen = next((one for one in memory if one.method == config.method), memory[0])
    half = itemsize / models.DTYPES[DTYPES[device.type]].itemsize  # the table's dtype may not be the run's
    fixed = stored_bytes(skeleton, 0)  # integers
    expected = fixed + int(((chosen.cpu if device.type == "cpu" else chosen.gpu) - fixed) * half)
    if config.offload is not None:
        expected = expected - weights if division is None else division.used
    timing = None
    if workload is not None:
        tell("measuring")
        with out_of_memory():
            timing = _measure(workload, batches, seconds, idle)
    return Forecast(
        config=config,
        weights=sum(map(elements, skeleton.parameters())),
        machine=machine(device.type),
        free_bytes=free,
        expected_bytes=max(expected, (timing.peak_bytes or 0) if timing else 0),
        memory=memory,
        rows=rows,
        load=load,
        timing=timing,
        reason=reason,
        division=division,
        approximate=given and workload is None,
    )


def free_memory(device: torch.device) -> int | None:
    """Bytes of a device's memory that are free; on the CPU within the limit of the container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = []
    info = Path("/proc/meminfo")
    if info.exists():
        found += [
            int(line.split()[1]) * 1024 for line in info.read_text().splitlines() if line.startswith("MemAvailable")
        ]
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists() and (limit := (group / "memory.max").read_text().strip()).isdecimal():
        found.append(int(limit) - int((group / "memory.current").read_text()))
    return min(found) if found else None


def _unzipped(workload: Workload) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    encoded, labels = zip(*workload.train, strict=True)
    return encoded, labels


def _read(config: Config, tell: Callable[[str], None]) -> tuple[Pool, dict[str, int]]:
    """The training examples, for a model that is not loaded."""
    tokenizer = models.tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    task = get_task(config.task, tokenizer)
    tell(f"reading {task.name}")
    data = None if config.data is None else Path(config.data)
    reads = models.reads(config.model, trust_remote_code=config.trust_remote_code)
    limits: dict[str, Any] = {"limit": config.train, "max_length": config.max_length}
    pool = encode(task, data, tokenizer, seed=config.data_seed, **limits, **reads)
    return pool, {"train": len(pool.encoded)}


def _batches(config: Config, pool: Pool) -> Batches:
    return Batches(len(pool.encoded), config.batch_size * config.accumulate, config.data_seed)


def _batch(pool: Pool, indices: Sequence[int]) -> Batch:
    return Batch(tuple(pool.encoded[i] for i in indices), tuple(pool.labels[i] for i in indices), pool.over)


def _memory(skeleton: Any, load: Load) -> list[Memory]:
    """Expected peaks of the paper's methods and of backpropagation."""
    sizes = {name: models.DTYPES[kind].itemsize for name, kind in DTYPES.items()}
    config = skeleton.config.get_text_config()

    def activations(itemsize: int) -> int:
        inner = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * config.hidden_size
        layer = 2 * load.tokens * (4 * config.hidden_size + 3 * inner) * itemsize
        return int(layer + 2 * load.positions * config.vocab_size * (itemsize + 4))

    def peak(need: Need) -> int:
        # the engine holds both perturbed copies of a tensor, while the paper's table counts one direction
        copies = 2 * need.held * need.bytes_each
        return need.weights_bytes + copies + need.kept_here + activations(need.bytes_each)

    tables = [table(skeleton, sizes[device]) for device in ("cpu", "cuda")]
    found = [Memory(cpu.method, peak(cpu), peak(gpu)) for cpu, gpu in zip(*tables, strict=True)]
    found.sort(key=lambda one: (one.method != "mezo_bcd", one.cpu))
    layers = getattr(config, "num_hidden_layers", 1)
    trained = sum(param.numel() for param in skeleton.parameters() if param.requires_grad)
    full = (tables[0][0].weights + (ADAM_COPIES - 1) * trained) * 4 + layers * activations(4) // 2
    return [*found, Memory(BACKPROPAGATION, full, full)]


def _measure(workload: Workload, batches: Batches, seconds: float, idle: int) -> Timing:
    """Take real steps for about ``seconds`` seconds, then evaluate a few examples.

    On a GPU the same steps are taken twice: the first time with the captures of their graphs, the second without.
    """
    config, device = workload.config, workload.engine.device
    taker = learner(config, workload.model, lambda record: None)
    gauge = Gauge(device, idle)

    def take(first: int, limit_s: float, most: int) -> list[float]:
        """Take steps; return the seconds of each, on a GPU between events, so that no step waits for the host."""
        start, marks = time.perf_counter(), [_mark(device)]
        while (taken := len(marks) - 1) < most and (taken < MIN_STEPS or time.perf_counter() - start < limit_s):
            taker.step(workload.objectives(batches.at(first + taken)), LR)
            marks.append(_mark(device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return [_between(a, b) for a, b in itertools.pairwise(marks)]

    capture_s = 0.0
    graphs = workload.engine.graphs
    if graphs is not None and isinstance(taker, ZerothOrder):
        before = taker.optimizer.state_dict()
        first = take(0, seconds / 2, MAX_STEPS)
        taker.flush()
        taker.optimizer.load_state_dict(before)
        times = take(0, seconds, len(first))
        if graphs.captures:
            each = max(0.0, sum(first) - sum(times)) / graphs.captures
            capture_s = each * _captures(workload, batches, len(taker.blocks))
    else:
        take(0, 0.0, WARMUP_STEPS)
        times = take(WARMUP_STEPS, seconds, MAX_STEPS)
    taker.flush()
    gauge.read(0 if graphs is None else graphs.bytes)
    taker.settle()
    error = statistics.stdev(times) / len(times) ** 0.5
    return Timing(len(times), statistics.fmean(times), error, capture_s, _evaluation_s(workload), gauge.peak)


def _mark(device: torch.device) -> Any:
    """A mark of this moment: an event on a GPU, otherwise the clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first: Any, second: Any) -> float:
    """Seconds between two marks."""
    return float(second - first if isinstance(first, float) else first.elapsed_time(second) / 1e3)


def _captures(workload: Workload, batches: Batches, blocks: int) -> int:
    """Number of steps that a run captures: one per block and shape of row, as far as they occur."""
    shapes: set[object] = set()
    for step in range(SAMPLED_BATCHES):
        for objective in workload.objectives(batches.at(step)):
            shapes |= {getattr(row, "shapes", None) for row, _ in getattr(objective, "rows", ())}
    return min(blocks * len(shapes), workload.config.steps, MAX_GRAPHS)


def _evaluation_s(workload: Workload) -> float:
    """Seconds of one evaluation of all splits, from a few of their examples."""
    total = 0.0
    for exam in workload.exams.values():
        some = exam.take(range(min(EVALUATED, len(exam.examples))))
        start = time.perf_counter()
        workload.evaluator(some)
        total += (time.perf_counter() - start) * len(exam.examples) / len(some.examples)
    return total
