"""What steps cost: measured when a run with an economical schedule begins, and kept with its configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ..bench.cost import measured
from ..engine.cost import relative, works
from . import compose
from .batch import Batches
from .config import Config
from .workload import Workload

ECONOMICAL = "economical"
ROUNDS = 3
"""Steps that are timed per block when a run begins: enough for probabilities that go with the root of the cost."""


def priced(workload: Workload, tell: Callable[[str], None]) -> Workload:
    """The workload with the costs of blocks in its schedule, if that is economical and has none.

    Args:
        workload: of a run that has not begun; its weights come out as they were.
        tell: is told what is going on.
    """
    config = workload.config
    if config.schedule != ECONOMICAL:
        return workload
    optimizer = compose.optimizer(config, workload.model)
    optimizer.lr = 0.0
    tell(f"timing steps on a few of {len(optimizer.blocks)} blocks")
    batches = Batches(len(workload.train), config.batch_size * config.accumulate, config.data_seed)
    costs = relative(
        measured(optimizer, workload.objectives(batches.at(0)), ROUNDS), works(workload.model, optimizer.blocks)
    )
    tell(f"a step costs {min(costs):g} to {max(costs):g} times the mean, depending on its block")
    priced = f"{ECONOMICAL}:{','.join(f'{cost:g}' for cost in costs)}"
    return dataclasses.replace(workload, config=config.replace(schedule=priced))


def as_begun(config: Config, begun: Config) -> Config:
    """The configuration with the costs that were measured when its run began."""
    if config.schedule == ECONOMICAL and (begun.schedule or "").startswith(f"{ECONOMICAL}:"):
        return config.replace(schedule=begun.schedule)
    return config
