"""The journal: what a step was, in a few bytes.

Base weights and records rebuild the weights at any step, bit for bit, because
noise, masks, bases and rounding bits are functions of what a record and the
method already say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .errors import ZeroBlockError

if TYPE_CHECKING:
    from .optimizer import ZeroOrder


@dataclasses.dataclass(frozen=True)
class Record:
    """One step.

    Args:
        step: counts from 0.
        block: index of the active block.
        coeffs: one a probe; a step whose coefficients are not finite moved nothing.
        lr: learning rate it used.
        losses: all that were measured.
        loss: the one people read.
    """

    step: int
    block: int
    coeffs: tuple[float, ...]
    lr: float
    losses: tuple[float, ...]
    loss: float


def replay(optimizer: ZeroOrder, records: Iterable[Record]) -> None:
    """Take recorded steps without measuring: the weights come out bit-identical.

    Args:
        optimizer: of the same method and seed as the run, standing at the first record's step.
        records: consecutive.
    """
    from .estimator import Replay

    records = list(records)
    if not records:
        return
    if records[0].step != optimizer.steps:
        raise ZeroBlockError(f"the records start at step {records[0].step}, the optimizer stands at {optimizer.steps}")
    live, rates = optimizer.estimator, [group["lr"] for group in optimizer.param_groups]
    optimizer.estimator = Replay(records)
    try:
        for record in records:
            if optimizer.block != record.block:
                raise ZeroBlockError(
                    f"step {record.step} was on block {record.block}, but this method would take block "
                    f"{optimizer.block}: the records are of another method, seed or order"
                )
            for group in optimizer.param_groups:
                group["lr"] = record.lr
            optimizer.step(None)
    finally:
        optimizer.estimator = live
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
