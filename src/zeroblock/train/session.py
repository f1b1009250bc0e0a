"""A session of a run, from the step that the run has reached to its end or to a stop."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import adapter
from ..budget import Budget
from ..composition import begin_as
from ..errors import ZeroBlockError
from ..evaluate.measurement import Measurement
from ..journal import Header, Record, replay
from ..report.about import block_sizes
from ..report.move import Moves
from ..report.summary import ADAPTER, select_measured, summarize
from ..report.track import Silent, Tracker, tracker
from ..report.view import Meter, View, peak_memory
from ..run.queue import MAX_STEPS
from ..shard import is_lost
from . import snapshot
from .batch import Batches
from .folder import Folder
from .follower import Log
from .learner import ZerothOrder, learner
from .lr import Rates, unweighted
from .meeting import Meetings
from .peers import Peers
from .stop import ECHO_SECONDS, Stop, Stopped
from .workload import Workload

BUFFERED_STEPS = 10_000
"""Steps that are kept in memory before they are written to ``steps.csv``."""
CHECKSUM_STEPS = 100
"""Steps between comparisons of the ranks' weights; evaluations and snapshots also begin with one."""
LESS = "lower --max-tokens (rows are split, the losses stay the same) or --batch-size"
"""How a single run needs less memory."""


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Args:
        folder: the run's folder.
        steps: the number of steps that the run has taken.
        summary: the content of ``summary.json``; None if the run was stopped before its end.
        reason: why it was stopped; empty if it finished.
        code: the matching exit status.
    """

    folder: Path
    steps: int
    summary: dict[str, Any] | None
    reason: str = ""
    code: int = 0


class Session:
    """One session of a run.

    Args:
        workload: the model, the task and the data.
        folder: the run's folder, locked by this process.
        view: shows the run.
        journal: takes the records; None for methods without a journal.
        peers: the ranks that take the steps together.
    """

    def __init__(
        self, workload: Workload, folder: Folder, view: View, journal: Log | None = None, peers: Peers | None = None
    ) -> None:
        self.workload, self.folder, self.view, self.journal = workload, folder, view, journal
        self.config, self.peers = workload.config, peers or Peers()
        if self.config.prefix is not None and self.peers.leads:
            self._settle_start()
        self.learner = learner(self.config, workload.model, self._on_step) if self.config.trains else None
        self.meter = Meter(self.config.steps, self.learner.blocks if self.learner else (), self._moves())
        self.tracker: Tracker = Silent()
        self.recorded = 0
        """Steps that the run has taken, including those still to be replayed."""
        self.skipped = 0
        """Steps that moved nothing, because their loss was not finite."""
        self.past: Sequence[Record] = ()
        """The records of a resumed run, until they have been replayed."""
        self.unwritten: list[Record] = []
        """Steps that are not in ``steps.csv`` yet."""
        self.progressed = False
        """Whether this session has added to the run; the clock ends it only then, or the run might never end."""
        self.proved = -1
        """The last step at which the ranks compared their weights."""
        self.seconds_before = 0.0
        self.start = time.monotonic()

    def _moves(self) -> Moves | None:
        """Computes the relative sizes of steps; None for other methods than zeroth-order ones."""
        if not isinstance(self.learner, ZerothOrder):
            return None
        optimizer = self.learner.optimizer
        return Moves(
            optimizer.parts, len(optimizer.blocks), optimizer.turns.most, block_sizes(optimizer), optimizer.clip
        )

    @property
    def sharded(self) -> bool:
        """Whether every rank holds a part of the weights, so that all must take the same passes."""
        return isinstance(self.learner, ZerothOrder) and self.learner.optimizer.weights.sharded

    @property
    def adapted(self) -> bool:
        """Whether the run trains an adapter."""
        return adapter.is_adapted(self.workload.model) and self.learner is not None

    @property
    def origin(self) -> dict[str, Any]:
        """Fields of the journal's header that, with the name of the base, determine the weights of step 0."""
        made = self.config.adapter
        origin: dict[str, Any] = {"adapter": made.record(self.workload.model)} if made else {}
        if self.config.weights is not None:
            origin["weights"] = self.config.weights
        dtypes = {param.dtype for param in self.workload.model.parameters()}
        return origin | ({"dtype": self.config.dtype} if len(dtypes) > 1 else {})

    def _settle_start(self) -> None:
        """Save the start of a prefix with the run, or restore the saved one: another machine computes another."""
        if self.journal is not None:
            adapter.restart_(self.workload.model, self.folder.path)
        else:
            with self.folder.writing():
                adapter.keep(self.workload.model, self.folder.path / adapter.START)

    @property
    def steps(self) -> int:
        """Steps that have been applied to the weights."""
        return self.learner.steps if self.learner else 0

    def restore(self, header: Header, records: Sequence[Record], force: bool) -> None:
        """Continue a run at the end of its records, or at the first evaluation that was lost.

        :meth:`_catch_up` then brings the weights there.
        """
        assert isinstance(self.learner, ZerothOrder)
        optimizer = self.learner.optimizer
        begin_as(optimizer, header.parts.get("subspace"))
        self.peers.together(lambda: header.check(optimizer, force=force))
        note, measurements = self.peers.first(
            lambda: (self.folder.reopen(records, len(records)), self.folder.measurements)
        )
        self.folder.hear(measurements)
        if note:
            self.view.note(note)
        self.recorded, self.past = len(records), records
        self.meter.recall(records)
        self.skipped = sum(not record.finite for record in records)
        self.seconds_before = max((one.elapsed for one in self.folder.measurements), default=0.0)
        wanted = set(self.workload.exams)
        past_evaluations = (step for step in self.config.evaluations if step < len(records))
        usable = next((step for step in past_evaluations if wanted - self.folder.splits_at(step)), len(records))
        reason = snapshot.load(self.folder.snapshot, optimizer, records[:usable]) if self.peers.leads else ""
        if reason:
            self.view.note(f"{reason}, so all steps are replayed")
        self.view.note(f"replaying {len(records) - self.steps} of {len(records)} steps")

    def _catch_up(self, evaluations: Sequence[int], stop: Stop) -> None:
        """Replay to the end of the records or to the next evaluation.

        A replay that is stopped leaves unusable weights, but does not change any files.
        """
        assert isinstance(self.learner, ZerothOrder)
        first = self.steps
        after = bisect.bisect_right(evaluations, first)
        end = min([len(self.past), *evaluations[after : after + 1]])

        def check(fraction: float) -> None:
            if self.peers.size == 1:  # several ranks stop together, after they have caught up
                stop.check(clock=False)
            self.view.replaying(first + int(fraction * (end - first)), self.recorded)

        replay(self.learner.optimizer, self.past[first:end], check)
        if end == len(self.past):
            self.past = ()

    def go(self) -> Result:
        """Run until the end, or until the run is stopped."""
        for note in self.workload.notes:
            self.view.note(note)
        if self.adapted:
            self.view.note(adapter.describe(self.workload.model))
        with contextlib.ExitStack() as stack:
            stack.callback(self.view.close)
            if self.peers.leads:
                with self.folder.writing():
                    self.tracker = tracker(self.config.track, self.folder.path, dataclasses.asdict(self.config))
            stack.callback(self.tracker.close)
            stop = stack.enter_context(Stop(self.config.max_minutes, ECHO_SECONDS if self.peers.size > 1 else 0.0))
            self.meter.begin(self.config.max_minutes)
            meetings = Meetings(self.peers, stop)
            stack.enter_context(out_of_memory(f"zeroblock resume {self.folder.path}" if self.journal else ""))
            stack.enter_context(self.folder.writing())
            try:
                self._go(stop, meetings)
            except Stopped:
                meetings.settle()
                self._flush()
                self._sync()
                return Result(self.folder.path, self.recorded, None, stop.reason, stop.code)
            except Exception as error:
                self._rescue()
                if self.sharded and self.peers.size > 1 and is_lost(error):  # in a pass, whose error names no rank
                    raise self.peers.channel.broken(error) from error
                raise
            self._flush()
            self._sync()  # a lost journal must raise an error before there is a summary
            summary = self._summary()
            self.folder.finish(summary)
            return Result(self.folder.path, self.steps, summary)

    def _go(self, stop: Stop, meetings: Meetings) -> None:
        config = self.config
        batches = Batches(len(self.workload.train), config.batch_size * config.accumulate, config.data_seed)
        evaluations = config.evaluations
        rates = self._rates(stop)
        due = frozenset(evaluations)

        def meet(now: bool = False) -> None:
            meetings.check(self.steps, clock=self.progressed and not config.timed, left=rates.left, now=now)

        while True:
            if self.steps in due:
                self._evaluate(stop, meet)
            if self.learner is None or self.steps >= config.steps:
                return
            ends = self.journal is None or config.timed  # a time limit completes the run: nothing will resume it
            if meetings.late and self.steps and not self.past and ends:
                self._evaluate(stop, meet)
                return
            if self.past:
                if self.peers.size == 1:
                    meet()
                self._catch_up(evaluations, stop)
                if not self.past:
                    self._prove()
                continue
            meet()
            step = self.steps
            batch = [i for one in range(step, step + self.learner.batches) for i in batches.at(one)]
            self.learner.step(self.workload.objectives(batch, self.learner.share), rates.at(step, meetings.left(step)))
            if self.steps % CHECKSUM_STEPS == 0:
                self._prove()
            if config.snapshot_every and self.steps % config.snapshot_every == 0:
                self._snapshot()

    def _rates(self, stop: Stop) -> Rates:
        """The learning rates of this session."""
        budget, taken = None, []
        if self.config.lr is None and isinstance(self.learner, ZerothOrder):
            budget = Budget.of(self.learner.optimizer)
            taken = unweighted(self.learner.optimizer.turns, self.past)
        end = stop.end if self.config.timed else None
        return Rates(self.config, budget, end, taken)

    def _on_step(self, record: Record) -> None:
        if self.journal is not None:
            self.journal.append(record)
        self.recorded += 1
        self.skipped += not record.finite
        self.unwritten.append(record)
        if len(self.unwritten) >= BUFFERED_STEPS:
            self._write_steps()
        self.progressed = True
        self.tracker.log(record.step + 1, {"loss": record.loss, "lr": record.lr})
        self.view.step(self.meter.step(record))

    def _evaluate(self, stop: Stop, meet: Callable[..., None]) -> None:
        """Measure the splits that have not been measured at this step.

        Args:
            stop: the signals and the clock.
            meet: asks all ranks whether to stop.
        """
        self._flush()
        self._sync()
        if self.learner is not None:
            self.learner.settle()  # only the last evaluation needs it: the others come after a fold
        missing = [split for split in self.workload.exams if split not in self.folder.splits_at(self.steps)]
        if missing and self.sharded and self.progressed:  # an evaluation of sharded weights cannot be stopped
            meet(now=True)
        if missing:
            self._prove()
        for split in missing:
            exam = self.workload.exams[split]

            def check(done: int, split: str = split, n: int = len(exam.examples)) -> None:
                resumable = self.journal is not None and not self.config.timed
                if not self.sharded:  # with shards, all ranks must evaluate all examples
                    stop.check(clock=self.learner is None or (self.progressed and resumable))
                self.view.evaluating(self.steps, split, done, n)

            evaluation = self.workload.evaluator(exam, check=check, ranks=None if self.sharded else self.peers)
            measurement = Measurement(self.steps, split, evaluation, self.elapsed)
            self.folder.measured(measurement)
            self.progressed = True
            self.view.measured(measurement)
            numbers = {f"{split}/{evaluation.metric}": evaluation.value, f"{split}/loss": evaluation.loss}
            self.tracker.log(self.steps, numbers)
        self._keep()
        self.folder.draw()
        self.meter.pause()

    def _keep(self) -> None:
        """Save weights or adapter if dev selects this step so far; a journal keeps the weights of every step."""
        chosen = select_measured(self.config, self.folder.measurements)
        if chosen is None or chosen.step != self.steps or not self.peers.leads:
            return
        if self.adapted:
            adapter.keep(self.workload.model, self.folder.path / ADAPTER)
        if self.learner is not None and self.config.save_weights:
            self.learner.keep(self.folder.model, self.workload.evaluator.tokenizer)

    def _flush(self) -> None:
        """Wait for all submitted steps, and write them to ``steps.csv``."""
        if self.learner is not None:
            try:
                self.learner.flush()
            finally:
                self._write_steps()

    def _write_steps(self) -> None:
        self.folder.add_steps(self.unwritten)
        self.unwritten.clear()

    def _sync(self) -> None:
        """Force the journal to disk; raises an error if its file was deleted or cut."""
        if self.journal is not None:
            self.journal.sync()

    def _rescue(self) -> None:
        """Write the steps that were under way when an error was raised; further errors here are ignored."""
        for _ in range(MAX_STEPS + 1):  # each failed attempt leaves one step fewer
            with contextlib.suppress(Exception):
                self._flush()
                return

    def _snapshot(self) -> None:
        if isinstance(self.learner, ZerothOrder):
            self.learner.flush()
            self._sync()  # a snapshot must not contain steps that the journal may lose
            self._prove()
            snapshot.save(self.folder.snapshot, self.learner.optimizer, writes=self.peers.leads)

    def _prove(self) -> None:
        """Compare the weights of all ranks, at most once per step, and write down their checksum."""
        if self.learner is None or self.peers.size == 1 or self.proved == self.steps:
            return
        self._flush()
        self.proved = self.steps
        self.folder.agreed(self.steps, self.learner.agree(), self.peers.size)

    @property
    def elapsed(self) -> float:
        """Seconds that the run has taken; earlier sessions count up to their last evaluation."""
        return self.seconds_before + time.monotonic() - self.start

    def _summary(self) -> dict[str, Any]:
        summary = summarize(self.config, self.folder.measurements)
        summary |= {"steps": self.steps, "seconds": round(self.elapsed, 3), "peak_memory": peak_memory()}
        if self.learner is not None:
            summary |= {"lr": self.config.lr, "seed": self.config.seed, "data_seed": self.config.data_seed}
            summary |= {"blocks": len(self.learner.blocks), "skipped": self.skipped}
        if self.adapted:
            summary["adapter"] = adapter.describe(self.workload.model)
        return summary


@contextlib.contextmanager
def out_of_memory(resume: str = "", fix: str = LESS) -> Iterator[None]:
    """Turn an out-of-memory error into one line of advice.

    Args:
        resume: the command that continues the run; empty if there is none.
        fix: what the user can do.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "can't allocate memory" not in str(error):
            raise
        advice = f"; the steps taken are kept: {resume} --max-tokens N" if resume else ""
        raise ZeroBlockError(f"out of memory: {fix}{advice}") from error
