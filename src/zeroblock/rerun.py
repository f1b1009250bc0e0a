"""Taking recorded steps again: base weights and records give the weights of any step."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator

from . import fused
from .errors import ZeroBlockError
from .estimator import Replay
from .fused import Progress
from .optimizer import ZeroOrder
from .record import Record
from .shard import local

CHUNK_ELEMENTS = 1 << 24
"""Weights that are checked at a time, so that the check takes little memory."""


def replay(optimizer: ZeroOrder, records: Iterable[Record], progress: Progress | None = None) -> None:
    """Take recorded steps without measuring: the weights come out bit-identical.

    Between two folds they are the weights that the run had at that step; ``optimizer.settle()`` brings them to θ.

    If every weight moves independently (SGD, on a GPU), its steps are taken together in
    registers; otherwise one after another.  A replay that is interrupted leaves
    weights that belong to no step.  A replay that makes weights infinite or NaN raises an error.

    Args:
        optimizer: an optimizer with the run's method and seed, at the first record's step.
        records: consecutive records.
        progress: called now and then with the fraction done.
    """
    before = not_finite(optimizer)  # the records did not cause these
    retake(optimizer, records, progress)
    if broken := not_finite(optimizer) - before:
        raise ZeroBlockError(
            f"the steps up to {optimizer.steps} make weights of {min(broken)!r} infinite or NaN, from which no run "
            "would have continued: the records were made up, or their base is a different one; zeroblock replay names "
            "the step"
        )


def not_finite(optimizer: ZeroOrder) -> set[str]:
    """Names of the trained tensors with an infinite or NaN weight."""
    return {
        name
        for name, param in optimizer.params.items()
        if name not in optimizer.weights.quantised  # integers are always finite
        and not all(bool(part.isfinite().all()) for part in local(param).reshape(-1).split(CHUNK_ELEMENTS))
    }


def retake(optimizer: ZeroOrder, records: Iterable[Record], progress: Progress | None = None) -> None:
    """Take the steps of the records again, without checking that the weights stay finite."""
    records = list(records)
    if not records:
        return
    for step, record in enumerate(records, start=optimizer.steps):
        if record.step != step:
            raise ZeroBlockError(
                f"there is no record of step {step}"
                if step > optimizer.steps
                else f"the records start at step {record.step}, the optimizer is at step {step}"
            )
    ready = fused.serves(optimizer)
    done = 0
    for together, group in itertools.groupby(_folds(records, optimizer.fold), key=lambda fold: ready and fold[0]):
        stretch = [record for _, fold in group for record in fold]

        def report(steps: float, done: int = done) -> None:
            if progress is not None:
                progress((done + steps) / len(records))

        (_leap if together else _walk)(optimizer, stretch, report)
        done += len(stretch)


def _folds(records: list[Record], size: int) -> Iterator[tuple[bool, list[Record]]]:
    """The records of each fold, and whether the fold is complete and every step of it moved the weights."""
    for _, group in itertools.groupby(records, key=lambda record: record.step // size):
        fold = list(group)
        yield len(fold) == size and all(record.finite for record in fold), fold


def _walk(optimizer: ZeroOrder, records: list[Record], report: Progress) -> None:
    """Take one step after another, as the run did."""
    live, patience, listener = optimizer.estimator, optimizer.patience, optimizer.listener
    optimizer.estimator = Replay(records, live)
    optimizer.patience = sys.maxsize  # the steps of a run that gave up can be replayed, too
    optimizer.listener = None  # these steps were reported before
    try:
        for done, record in enumerate(records):
            _check(record, optimizer.block)
            optimizer.step()
            report(done + 1)
    finally:
        optimizer.estimator, optimizer.patience, optimizer.listener = live, patience, listener


def _leap(optimizer: ZeroOrder, records: list[Record], report: Progress) -> None:
    """Take all steps of a block together, block after block."""
    optimizer.flush()
    plan = optimizer.plan()  # raises if weights were settled between folds
    turn = plan.turn
    visits: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        _check(record, turn.block)
        weighed = dataclasses.replace(record, coeffs=plan.weighed(record.coeffs, record.block))
        for block, factor in turn.active:  # every block has its own learning rate
            visits[block].append(weighed if factor == 1 else dataclasses.replace(weighed, lr=record.lr * factor))
        turn = optimizer.turns.after(turn, record)
    share = len(records) / sum(map(len, visits.values()))  # a step of several blocks is among the visits of each
    fused.advance(optimizer, visits, lambda done: report(share * done))
    optimizer.enter(turn)
    optimizer.skipping.run, optimizer.record = 0, records[-1]


def _check(record: Record, block: int) -> None:
    """Refuse a record that the schedule contradicts."""
    if record.block != block:
        raise ZeroBlockError(
            f"step {record.step} was on block {record.block}, but this method would take block {block}: "
            "the records are of another method, seed or order"
        )
