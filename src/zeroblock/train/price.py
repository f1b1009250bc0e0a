"""The cost of steps, measured when a run with an economical schedule begins and kept in its configuration."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

from ..bench.cost import measured
from ..engine.cost import relative, works
from ..errors import ZeroBlockWarning
from ..schedule import COSTS_ALONE
from . import compose
from .batch import Batches
from .config import Config
from .peers import Peers
from .workload import Workload

ECONOMICAL = "economical"
ALONE = Peers()
ROUNDS = 3
"""Steps timed per block when a run begins: enough, because probabilities depend on the square root of the cost."""


def priced(workload: Workload, tell: Callable[[str], None], peers: Peers = ALONE) -> Workload:
    """Put measured costs of the blocks into the schedule of a workload, if that is economical and has none.

    Every rank measures by itself, and all take the costs that the leader measured.

    Args:
        workload: the workload of a run that has not begun; its weights are the same on return.
        tell: called with lines for the user.
        peers: the ranks.
    """
    config = workload.config
    if config.schedule != ECONOMICAL:
        return workload
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ZeroBlockWarning)  # about ranks that step separately, as they should here
        optimizer = compose.optimizer(config, workload.model, parallel=None)
    optimizer.lr = 0.0
    tell(f"timing steps on a few of {len(optimizer.blocks)} blocks")
    batches = Batches(len(workload.train), config.batch_size * config.accumulate, config.data_seed)
    objectives, work = workload.objectives(batches.at(0)), works(workload.model, optimizer.blocks)
    costs = peers.each(lambda: relative(measured(optimizer, objectives, ROUNDS), work))[peers.leader]
    tell(f"a step costs {min(costs):g} to {max(costs):g} times the mean, depending on its block")
    priced = f"{ECONOMICAL}:{','.join(f'{cost:g}' for cost in costs)}"
    if (
        optimizer.rule.block_numbers or optimizer.rule.unscaled
    ):  # steps of all blocks have one size, whatever the size of their coefficients
        priced += COSTS_ALONE
    return dataclasses.replace(workload, config=config.replace(schedule=priced))


def as_begun(config: Config, begun: Config) -> Config:
    """The configuration with the costs that were measured when its run began."""
    if config.schedule == ECONOMICAL and (begun.schedule or "").startswith(f"{ECONOMICAL}:"):
        return config.replace(schedule=begun.schedule)
    return config
