"""What several ranks gain: a step, its message, a comparison of weights and an evaluation, beside one process."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import ZeroBlockWarning
from ..optimizer import ZeroOrder
from ..ranks import Ranks
from ..train.batch import Batches
from ..train.compose import optimizer
from ..train.learner import ZerothOrder
from ..train.peers import Peers
from ..train.workload import Workload
from . import host

WARM_UP_STEPS = 3
MESSAGES = 200
"""Messages whose median is the time of one."""


@dataclass(frozen=True)
class RanksRow:
    """The parts of a run on several ranks, and the same in one process while the other ranks wait.

    Args:
        model, task, method: what is trained.
        device: ``cpu`` or ``cuda``.
        dtype: of the weights.
        ranks: how many there are.
        parallel: what they share.
        batch_size: examples per step.
        shares: micro-batches per step, for one process as well.
        probes: directions per step.
        alone_ms: median milliseconds per step of one process.
        step_ms: the same of the ranks together.
        speedup: of ``alone_ms`` to ``step_ms``.
        message_us: median microseconds of one message between all ranks, with nothing to wait for.
        message_bytes: that one rank sends per step.
        checksum_ms: milliseconds of one comparison of the weights.
        evaluate_alone_s: seconds of one process for the evaluated examples.
        evaluate_s: the same of the ranks together.
        evaluate_speedup: their ratio.
        examples: evaluated.
        machine, versions, date: of the measurement.
    """

    model: str
    task: str
    method: str
    device: str
    dtype: str
    ranks: int
    parallel: str
    batch_size: int
    shares: int
    probes: int
    alone_ms: float
    step_ms: float
    speedup: float
    message_us: float
    message_bytes: int
    checksum_ms: float
    evaluate_alone_s: float
    evaluate_s: float
    evaluate_speedup: float
    examples: int
    machine: str
    versions: str
    date: str


def measure(workload: Workload, peers: Peers, steps: int, tell: Callable[[str], None]) -> RanksRow:
    """Measure all parts; every rank calls this, and gets the numbers of rank 0.

    The learning rate is zero, so that the weights of all ranks stay the same.

    Args:
        workload: of a configuration whose ``parallel`` and ``shares`` are decided.
        peers: the ranks.
        steps: that are timed.
        tell: is called with a line about each part.
    """
    config = workload.config
    assert config.parallel is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ZeroBlockWarning)  # of a process that goes its own way, as it should
        alone = optimizer(config, workload.model, parallel=None)
    tell("one process")
    alone_ms = peers.first(lambda: _steps(alone, workload, steps))
    together = optimizer(config, workload.model, parallel=Ranks.of(config.parallel, probes=config.probes))
    tell(f"{peers.size} ranks")
    step_ms = peers.each(lambda: _steps(together, workload, steps))[0]
    team = together.team
    assert team is not None
    points = len(together.plan().points)
    message = torch.zeros(team.capacity, 1 + -(-points // len(team.ranks.grid[0])), dtype=torch.float64)
    sent = message.to(team.channel.device)
    tell("messages, checksums and evaluations")
    message_s = _median(lambda: team.channel.gather(sent), MESSAGES)
    checksum_s = _median(lambda: team.agree(together.steps), WARM_UP_STEPS)
    exam = workload.exams["dev"]
    own_s = peers.first(lambda: workload.evaluator(exam).seconds)
    shared_s = workload.evaluator(exam, ranks=peers).seconds
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
        speedup=round(alone_ms / step_ms, 3),
        message_us=round(1e6 * message_s, 1),
        message_bytes=message.nbytes,
        checksum_ms=round(1e3 * checksum_s, 3),
        evaluate_alone_s=round(own_s, 4),
        evaluate_s=round(shared_s, 4),
        evaluate_speedup=round(own_s / shared_s, 3),
        examples=len(exam.examples),
        machine=host.machine(first.device.type),
        versions=host.versions(),
        date=host.today(),
    )


def _steps(taker: ZeroOrder, workload: Workload, steps: int) -> float:
    """Median milliseconds per step, packing included."""
    config = workload.config
    learner = ZerothOrder(taker, lambda record: None)
    batches = Batches(len(workload.train), config.batch_size * config.accumulate, config.data_seed)
    times = []
    for step in range(WARM_UP_STEPS + steps):
        begin = time.perf_counter()
        learner.step(workload.objectives(batches.at(step), learner.share), 0.0)
        learner.flush()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times[WARM_UP_STEPS:])


def _median(work: Callable[[], object], times: int) -> float:
    """Median seconds of some work; the first time does not count."""
    seconds = []
    for _ in range(times + 1):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])
