"""The crew of a sweep makes all its runs, several at a time, each in a worker."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from .outcome import Outcome, due, folder_of, read
from .plan import Run, Sweep
from .worker import Worker

Tell = Callable[[str, Run, Outcome | None, str], None]
"""Called with "begin", "end" or "fail", the run, its outcome, and the reason of a failure."""


class Hand(Protocol):
    """Makes runs, one after another: a process of this machine (:class:`Worker`) or tasks of a cluster."""

    alive: bool
    """Whether it can make another run."""

    def make(self, run: Run, folder: Path, log: Path) -> str:
        """Make a run to its end; return why it failed, empty if it did not."""
        ...

    def stop(self) -> None:
        """Ask it to stop its run and end."""
        ...

    def close(self) -> None:
        """Stop it and wait until it has ended."""
        ...


Hire = Callable[[], Hand]
"""Gives one more hand."""


def local(jobs: int) -> Hire:
    """Hire processes of this machine, each with its share of the cores.

    Args:
        jobs: the number of runs at a time.
    """
    return lambda: Worker(max(1, (os.cpu_count() or 1) // jobs) if jobs > 1 else None)


class Crew:
    """Makes all runs of a sweep.

    Args:
        sweep: the runs that are wanted.
        folder: holds the run folders under ``runs`` and their output under ``log``.
        jobs: the number of runs at a time.
        tell: is called at every begin and end, one call at a time.
        hire: gives one more hand; by default a process of this machine.
    """

    def __init__(self, sweep: Sweep, folder: Path, jobs: int, tell: Tell, hire: Hire | None = None) -> None:
        self.sweep, self.runs, self.logs, self.jobs, self.tell = sweep, folder / "runs", folder / "log", jobs, tell
        self.hire = hire or local(jobs)
        self.outcomes = read(sweep, self.runs)
        self.failed: dict[str, str] = {}
        self.running: set[str] = set()
        self.changed = threading.Condition()
        self.workers: list[Hand] = []
        self.stopped = False
        self.error: Exception | None = None

    def make(self) -> None:
        """Make every run that is not finished; a failure is noted in ``failed`` and stops no other run."""
        self.runs.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(exist_ok=True)
        threads = [threading.Thread(target=self._serve) for _ in range(self.jobs)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            self._stop()
            for worker in self.workers:
                worker.close()
            for thread in threads:
                thread.join()
            raise
        if self.error is not None:
            raise self.error

    def _serve(self) -> None:
        """One thread: a worker, and runs for it while any are left."""
        worker: Hand | None = None
        try:
            while run := self._take():
                if worker is None or not worker.alive:
                    if worker is not None:
                        worker.close()
                    worker = self._hire()
                folder = folder_of(run, self.runs)
                error = worker.make(run, folder, self.logs / f"{run.name}.txt")
                self._note(run, None if error else Outcome.read(folder), error)
        except Exception as error:  # a full disk or a closed pipe concerns every run, so all stop
            self.error = error
            self._stop()
        finally:
            if worker is not None:
                worker.close()

    def _stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()
            for worker in self.workers:
                worker.stop()

    def _hire(self) -> Hand:
        with self.changed:
            worker = self.hire()
            self.workers.append(worker)
            if self.stopped:
                worker.stop()
            return worker

    def _take(self) -> Run | None:
        """Take the next run; wait while it depends on runs under way."""
        with self.changed:
            while not self.stopped:
                ready = [run for run in due(self.sweep, self.outcomes, self.failed) if run.name not in self.running]
                if ready:
                    self.running.add(ready[0].name)
                    self.tell("begin", ready[0], None, "")
                    return ready[0]
                if not self.running:
                    return None
                self.changed.wait()
        return None

    def _note(self, run: Run, outcome: Outcome | None, error: str) -> None:
        with self.changed:
            self.running.discard(run.name)
            if outcome is not None:
                self.outcomes[run.name] = outcome
                self.tell("end", run, outcome, "")
            elif not self.stopped:
                self.failed[run.name] = error or "it ended before its last step"
                self.tell("fail", run, None, self.failed[run.name])
            self.changed.notify_all()
