"""The gain of several ranks over one process: a step, its message, a comparison of weights and an evaluation."""

from __future__ import annotations

import dataclasses
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from .. import task as tasks
from ..errors import ZeroBlockWarning
from ..optimizer import ZeroOrder
from ..ranks import Ranks
from ..train import cache
from ..train.batch import Batches
from ..train.compose import optimizer
from ..train.config import Config
from ..train.learner import ZerothOrder
from ..train.peers import Peers
from ..train.workload import Workload, engine_of
from . import batch, host
from .row import Row

WARM_UP_STEPS = 3
ROUNDS = 3
"""Rounds in which the timed steps are taken alone and then together; their medians count."""
MESSAGES = 200
"""Number of timed messages; their median counts."""


@dataclass(frozen=True, kw_only=True)
class RanksRow(Row):
    """The times of a run's parts on several ranks, and in one process while the other ranks wait.

    One rank alone sends messages to itself: then the difference is the cost of a process group.

    Args:
        ranks: number of ranks.
        parallel: the work that they divide: data, probes or both.
        shares: micro-batches per step, for one process as well.
        probes: directions per step.
        alone_ms: median milliseconds per step of one process.
        step_ms: the same for the ranks together.
        captured: whether the message is part of the step that is submitted to the GPU; else the host sends it.
        speedup: ratio of ``alone_ms`` to ``step_ms``.
        message_us: median microseconds of one message between all ranks, with nothing to wait for.
        message_bytes: bytes that one rank sends per step.
        checksum_ms: milliseconds of one comparison of the weights.
        evaluate_alone_s: seconds of one process for the evaluated examples; None if there are none.
        evaluate_s: the same for the ranks together.
        evaluate_speedup: their ratio.
        examples: number of evaluated examples.
    """

    ranks: int
    parallel: str
    shares: int
    probes: int
    alone_ms: float
    step_ms: float
    captured: bool
    speedup: float
    message_us: float
    message_bytes: int
    checksum_ms: float
    evaluate_alone_s: float | None
    evaluate_s: float | None
    evaluate_speedup: float | None
    examples: int
    command: ClassVar[str] = "ranks"


def encoded(config: Config, path: Path) -> Workload:
    """A workload of examples that are token ids already; it has nothing to evaluate.

    Args:
        config: a resolved configuration.
        path: a file of ``zeroblock bench encode``, or a folder of them.
    """
    task = tasks.get(config.task)
    pool = batch.read(path / f"{task.name}.jsonl" if path.is_dir() else path, task.over)
    model: Any = cache.model(config)
    pool = pool.folded(int(model.config.get_text_config().vocab_size))
    pairs = tuple(zip(pool.encoded, pool.labels, strict=True))
    return Workload(config, model, engine_of(config, model), task, cast(Any, None), pairs, None, {}, ())


def measure(workload: Workload, peers: Peers, steps: int, tell: Callable[[str], None]) -> RanksRow:
    """Measure all parts; every rank calls this, and gets the numbers of rank 0.

    Every step uses the same batch, so that a GPU captures it once, and the learning rate is zero, so that the
    weights of all ranks stay the same.

    Args:
        workload: a workload whose configuration has its ``parallel`` and ``shares`` set.
        peers: the ranks.
        steps: minimum number of timed steps; rounded up to whole cycles of blocks on a GPU.
        tell: called with a line about each part.
    """
    config = workload.config
    assert config.parallel is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ZeroBlockWarning)  # about a process that steps alone, which is intended
        alone = _Taker(workload, optimizer(config, workload.model, parallel=None))
    twin = dataclasses.replace(workload, engine=engine_of(config, workload.model))  # which keeps separate captures
    joined = optimizer(config, workload.model, parallel=Ranks.of(config.parallel, probes=config.probes))
    together = _Taker(twin, joined)
    cycle = len(joined.blocks) if next(workload.model.parameters()).is_cuda else 1
    steps = -(-steps // cycle) * cycle
    tell("one process")
    peers.first(lambda: alone.ms(max(cycle, WARM_UP_STEPS)))
    tell(f"{peers.size} rank{'s' if peers.size > 1 else ''}")
    peers.each(lambda: together.ms(max(cycle, WARM_UP_STEPS)))
    rounds = [(peers.first(lambda: alone.ms(steps)), peers.each(lambda: together.ms(steps))[0]) for _ in range(ROUNDS)]
    alone_ms, step_ms = (statistics.median(times) for times in zip(*rounds, strict=True))
    team = joined.team
    assert team is not None
    points = len(joined.plan().points)
    message = torch.zeros(team.capacity, 1 + -(-points // len(team.ranks.grid[0])), dtype=torch.float64)
    sent = message.to(team.channel.device)
    tell("messages and checksums" if not workload.exams else "messages, checksums and evaluations")
    message_s = _median(lambda: team.channel.gather(sent), MESSAGES)
    checksum_s = _median(lambda: team.agree(joined.steps), WARM_UP_STEPS)
    own_s, shared_s = _evaluations(workload, peers)
    first = next(workload.model.parameters())
    return RanksRow(
        model=config.model,
        task=config.task,
        method=config.method,
        device=first.device.type,
        dtype=config.dtype,
        ranks=peers.size,
        parallel=config.parallel,
        batch_size=config.batch_size * config.accumulate,
        shares=config.accumulate * (config.shares or 1),
        probes=config.probes,
        alone_ms=round(alone_ms, 3),
        step_ms=round(step_ms, 3),
        captured=team.submits,
        speedup=round(alone_ms / step_ms, 3),
        message_us=round(1e6 * message_s, 1),
        message_bytes=message.nbytes,
        checksum_ms=round(1e3 * checksum_s, 3),
        evaluate_alone_s=None if own_s is None else round(own_s, 4),
        evaluate_s=None if shared_s is None else round(shared_s, 4),
        evaluate_speedup=None if own_s is None or shared_s is None else round(own_s / shared_s, 3),
        examples=len(workload.exams["dev"].examples) if workload.exams else 0,
        **host.stamp(first.device.type),
    )


class _Taker:
    """Takes steps on the first batch of a run.

    Args:
        workload: the workload to measure.
        optimizer: takes the steps.
    """

    def __init__(self, workload: Workload, optimizer: ZeroOrder) -> None:
        self.workload, self.learner = workload, ZerothOrder(optimizer, lambda record: None)
        config = workload.config
        self.batch = Batches(len(workload.train), config.batch_size * config.accumulate, config.data_seed).at(0)

    def ms(self, steps: int) -> float:
        """Milliseconds per step, packing included."""
        begin = time.perf_counter()
        for _ in range(steps):
            self.learner.step(self.workload.objectives(self.batch, self.learner.share), 0.0)
        self.learner.flush()
        return 1e3 * (time.perf_counter() - begin) / steps


def _evaluations(workload: Workload, peers: Peers) -> tuple[float | None, float | None]:
    """Seconds of the evaluation in one process, and on the ranks together; None without examples."""
    exam = workload.exams.get("dev")
    if exam is None:
        return None, None
    own = peers.first(lambda: workload.evaluator(exam).seconds)
    return own, workload.evaluator(exam, ranks=peers).seconds


def _median(work: Callable[[], object], times: int) -> float:
    """Median seconds of a call; the first call does not count."""
    seconds = []
    for _ in range(times + 1):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])
