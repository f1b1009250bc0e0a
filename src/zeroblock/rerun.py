"""Taking recorded steps again: base weights and records give the weights of any step."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from .errors import ZeroBlockError
from .record import Record

if TYPE_CHECKING:
    from .direction import Direction
    from .estimator import Estimate, Estimator, Measure, Replay
    from .optimizer import ZeroOrder

Progress = Callable[[float], None]
"""Hears of the fraction that is done."""


def replay(optimizer: ZeroOrder, records: Iterable[Record], progress: Progress | None = None) -> None:
    """Take recorded steps without measuring: the weights come out bit-identical.

    Between two folds they are the run's weights of that step, which ``optimizer.settle()`` brings to θ.

    Where every weight moves by itself (SGD, on a GPU) its steps are taken together, in
    registers; otherwise step after step.  A replay that is interrupted leaves
    weights of no step at all.

    Args:
        optimizer: of the same method and seed as the run, standing at the first record's step.
        records: consecutive.
        progress: called now and then with the fraction done.
    """
    from . import fused

    records = list(records)
    if not records:
        return
    for step, record in enumerate(records, start=optimizer.steps):
        if record.step != step:
            raise ZeroBlockError(
                f"there is no record of step {step}"
                if step > optimizer.steps
                else f"the records start at step {record.step}, the optimizer stands at {step}"
            )
    ready = fused.serves(optimizer)
    done = 0
    for together, group in itertools.groupby(_folds(records, optimizer.fold), key=lambda fold: ready and fold[0]):
        stretch = [record for _, fold in group for record in fold]

        def report(steps: float, done: int = done) -> None:
            if progress is not None:
                progress((done + steps) / len(records))

        (fused.advance if together else _walk)(optimizer, stretch, report)
        done += len(stretch)


def _folds(records: list[Record], size: int) -> Iterator[tuple[bool, list[Record]]]:
    """The records of each fold, and whether they are all of it and moved the weights."""
    for _, group in itertools.groupby(records, key=lambda record: record.step // size):
        fold = list(group)
        yield len(fold) == size and all(record.finite for record in fold), fold


def _walk(optimizer: ZeroOrder, records: list[Record], report: Progress) -> None:
    """Step after step, as the run did."""
    from .estimator import Replay

    live, patience, listener = optimizer.estimator, optimizer.patience, optimizer.listener
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.estimator = Replay(records)
    if optimizer.restore == "subtract":
        optimizer.estimator = _Retraced(optimizer.estimator, live)
    optimizer.patience = sys.maxsize  # a run that gave up can be rebuilt
    optimizer.listener = None  # these steps are known
    try:
        for done, record in enumerate(records):
            if optimizer.block != record.block:
                raise another_run(record, optimizer.block)
            for group in optimizer.param_groups:
                group["lr"] = record.lr
            optimizer.step()
            report(done + 1)
    finally:
        optimizer.estimator, optimizer.patience, optimizer.listener = live, patience, listener
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def another_run(record: Record, block: int) -> ZeroBlockError:
    """The error for a record that the schedule contradicts."""
    return ZeroBlockError(
        f"step {record.step} was on block {record.block}, but this method would take block {block}: "
        "the records are of another method, seed or order"
    )


@dataclasses.dataclass(frozen=True)
class _Retraced:
    """Replay of a run that measured in place: it takes the same walk, after which 16-bit weights are elsewhere."""

    recorded: Replay
    live: Estimator

    @property
    def probes(self) -> int:
        return self.live.probes

    def __call__(self, measure: Measure, directions: Sequence[Direction]) -> Estimate:
        from .direction import visit

        self.live(lambda points: visit(points, lambda: 0.0), directions)
        return self.recorded(measure, directions)
