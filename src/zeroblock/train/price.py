"""What steps cost: measured when a run with an economical schedule begins, and kept with its configuration."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

from ..bench.cost import measured
from ..engine.cost import relative, works
from ..errors import ZeroBlockWarning
from . import compose
from .batch import Batches
from .config import Config
from .peers import Peers
from .workload import Workload

ECONOMICAL = "economical"
ALONE = Peers()
ROUNDS = 3
"""Steps that are timed per block when a run begins: enough for probabilities that go with the root of the cost."""


def priced(workload: Workload, tell: Callable[[str], None], peers: Peers = ALONE) -> Workload:
    """The workload with the costs of blocks in its schedule, if that is economical and has none.

    Several ranks all measure, each by itself, and take what the leader has measured.

    Args:
        workload: of a run that has not begun; its weights come out as they were.
        tell: is told what is going on.
        peers: the ranks.
    """
    config = workload.config
    if config.schedule != ECONOMICAL:
        return workload
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ZeroBlockWarning)  # of a process that goes its own way, as it should
        optimizer = compose.optimizer(config, workload.model, parallel=None)
    optimizer.lr = 0.0
    tell(f"timing steps on a few of {len(optimizer.blocks)} blocks")
    batches = Batches(len(workload.train), config.batch_size * config.accumulate, config.data_seed)
    objectives, work = workload.objectives(batches.at(0)), works(workload.model, optimizer.blocks)
    costs = peers.each(lambda: relative(measured(optimizer, objectives, ROUNDS), work))[peers.leader]
    tell(f"a step costs {min(costs):g} to {max(costs):g} times the mean, depending on its block")
    priced = f"{ECONOMICAL}:{','.join(f'{cost:g}' for cost in costs)}"
    return dataclasses.replace(workload, config=config.replace(schedule=priced))


def as_begun(config: Config, begun: Config) -> Config:
    """The configuration with the costs that were measured when its run began."""
    if config.schedule == ECONOMICAL and (begun.schedule or "").startswith(f"{ECONOMICAL}:"):
        return config.replace(schedule=begun.schedule)
    return config
