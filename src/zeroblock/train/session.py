"""A session: one sitting of a run, from where it stands to its end or to where it is stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ZeroBlockError
from ..evaluate.measurement import Measurement
from ..journal import Header, Journal, Record, replay
from ..optimizer import PENDING
from ..report.summary import summarize
from ..report.track import Silent, Tracker, tracker
from ..report.view import Meter, View, peak_memory
from . import snapshot
from .batch import Order
from .folder import Folder
from .learner import ZerothOrder, learner
from .lr import rate
from .stop import Stop, Stopped
from .workload import Setting


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Args:
        folder: where it is.
        steps: that it has taken.
        summary: as in ``summary.json``; None where it stopped before its end.
        reason: why it stopped; empty where it finished.
        code: the exit status that says so.
    """

    folder: Path
    steps: int
    summary: dict[str, Any] | None
    reason: str = ""
    code: int = 0


class Session:
    """One sitting of a run.

    Args:
        setting: what it works on.
        folder: where it writes.
        view: shows it.
        journal: takes the records; None where there is none.
    """

    def __init__(self, setting: Setting, folder: Folder, view: View, journal: Journal | None = None) -> None:
        self.setting, self.folder, self.view, self.journal = setting, folder, view, journal
        self.config = setting.config
        self.records: list[Record] = []
        self.left: list[Record] = []
        self.learner = learner(self.config, setting.model, self._heard) if self.config.trains else None
        self.meter = Meter(self.config.steps, self.learner.blocks if self.learner else ())
        self.tracker: Tracker = Silent()
        self.moved = False
        """Whether anything was added to the run: a sitting that the clock ends has, or none would ever end it."""
        self.before = 0.0
        self.start = time.monotonic()

    @property
    def steps(self) -> int:
        return self.learner.steps if self.learner else 0

    def restore(self, header: Header, records: list[Record], force: bool) -> None:
        """Stand where the records end, or where an evaluation of theirs was lost: :meth:`_catch_up` does the rest."""
        assert isinstance(self.learner, ZerothOrder)
        optimizer = self.learner.optimizer
        header.check(optimizer, force=force)
        self.folder.reopen(len(records))
        self.before = max((one.elapsed for one in self.folder.measurements), default=0.0)
        splits = set(self.setting.exams)
        lost = [step for step in self.config.evaluations if step < len(records) and splits - self.folder.at(step)]
        unused = snapshot.load(self.folder.snapshot, optimizer, records[: min([len(records), *lost])])
        if unused:
            self.view.note(f"{unused}, so all steps are replayed")
        self.records, self.left = list(records), records[optimizer.steps :]
        self.view.note(f"replaying {len(self.left)} of {len(records)} steps")

    def _catch_up(self, due: frozenset[int], stop: Stop) -> None:
        """Replay to the end of the records, or to the next evaluation; where stopped, no weights are of use."""
        assert isinstance(self.learner, ZerothOrder)
        first = self.steps
        count = min([len(self.left), *(step - first for step in due if step > first)])

        def check(fraction: float) -> None:
            stop.check(clock=False)
            self.view.replaying(first + int(fraction * count), len(self.records))

        replay(self.learner.optimizer, self.left[:count], check)
        self.left = self.left[count:]

    def go(self) -> Result:
        """To the end, or to where it is stopped."""
        for note in self.setting.notes:
            self.view.note(note)
        with contextlib.ExitStack() as stack:
            stack.callback(self.view.close)
            self.tracker = tracker(self.config.track, self.folder.path, dataclasses.asdict(self.config))
            stack.callback(self.tracker.close)
            stop = stack.enter_context(Stop(self.config.max_minutes))
            stack.enter_context(out_of_memory(f"zeroblock resume {self.folder.path}" if self.journal else ""))
            stack.enter_context(self.folder.writing())
            try:
                self._go(stop)
            except Stopped:
                self._flush()
                taken = len(self.records)  # which a replay that was stopped has not come to
                return Result(self.folder.path, taken, None, stop.reason, stop.code)
            except Exception:
                self._rescue()
                raise
            self._flush()
            summary = self._summary()
            self.folder.finish(summary)
            return Result(self.folder.path, self.steps, summary)

    def _go(self, stop: Stop) -> None:
        config = self.config
        order = Order(len(self.setting.train), config.batch_size * config.accumulate, config.data_seed)
        due = frozenset(config.evaluations)
        while True:
            if self.steps in due:
                self._evaluate(stop)
            if self.learner is None or self.steps >= config.steps:
                return
            if stop.late and self.steps and self.journal is None:  # what cannot be resumed ends here instead
                self._evaluate(stop)
                return
            stop.check(clock=self.moved)
            if self.left:
                self._catch_up(due, stop)
                continue
            step = self.steps
            self.learner.step(self.setting.closures(order.batch(step)), rate(config, step))
            if config.snapshot_every and self.steps % config.snapshot_every == 0:
                self._snapshot()

    def _heard(self, record: Record) -> None:
        if self.journal is not None:
            self.journal.append(record)
        self.records.append(record)
        self.moved = True
        self.tracker.log(record.step + 1, {"loss": record.loss, "lr": record.lr})
        self.view.step(self.meter.step(record))

    def _evaluate(self, stop: Stop) -> None:
        """Measure what has not been measured yet at this step."""
        self._flush()
        if self.learner is not None:
            self.learner.settle()  # which is to do at the end only: between, evaluations come with folds
        for split, exam in self.setting.exams.items():
            if split in self.folder.at(self.steps):
                continue

            def check(done: int, split: str = split, n: int = len(exam.examples)) -> None:
                stop.check(clock=self.learner is None or (self.moved and self.journal is not None))
                self.view.evaluating(self.steps, split, done, n)

            found = self.setting.evaluator(exam, check=check)
            measurement = Measurement(self.steps, split, found, self.elapsed)
            self.folder.measured(measurement)
            self.moved = True
            self.view.measured(measurement)
            self.tracker.log(self.steps, {f"{split}/{found.metric}": found.value, f"{split}/loss": found.loss})
        self.meter.pause()

    def _flush(self) -> None:
        """Have every step told and written."""
        if self.learner is not None:
            try:
                self.learner.flush()
            finally:
                self.folder.steps(self.records)

    def _rescue(self) -> None:
        """Have the steps that were under way written, though something failed, which is what to hear of."""
        for _ in range(PENDING + 1):  # each attempt that fails has one step less before it
            with contextlib.suppress(Exception):
                self._flush()
                return

    def _snapshot(self) -> None:
        if isinstance(self.learner, ZerothOrder):
            self.learner.flush()
            if self.journal is not None:
                self.journal.sync()  # a snapshot must not know of steps that the journal may lose
            snapshot.save(self.folder.snapshot, self.learner.optimizer)

    @property
    def elapsed(self) -> float:
        """Seconds that the run has taken, earlier sittings counted up to their last evaluation."""
        return self.before + time.monotonic() - self.start

    def _summary(self) -> dict[str, Any]:
        found = summarize(self.config, self.folder.measurements)
        found |= {"steps": self.steps, "seconds": round(self.elapsed, 3), "peak_memory": peak_memory()}
        if self.learner is not None:
            found |= {"lr": self.config.lr, "seed": self.config.seed, "data_seed": self.config.data_seed}
            found["blocks"] = len(self.learner.blocks)
            found["skipped"] = sum(not all(map(math.isfinite, record.coeffs)) for record in self.records)
        return found


@contextlib.contextmanager
def out_of_memory(again: str = "") -> Iterator[None]:
    """One line of advice where memory runs out; the weights are never touched while measuring."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "can't allocate memory" not in str(error):
            raise
        goes_on = f"; the steps taken are kept: {again} --max-tokens N" if again else ""
        raise ZeroBlockError(
            f"out of memory: lower --max-tokens (rows are split, the losses stay the same) or --batch-size{goes_on}"
        ) from error
