"""Hands: several work at a time, and each makes one run after another until none is left."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from .plan import Run
from .worker import Worker


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

    def kill(self) -> None:
        """End it at once, in the middle of a step; the journal keeps the steps before."""
        ...


Hire = Callable[[], Hand]
"""Returns one more hand."""


def local(jobs: int) -> Hire:
    """Hire processes on this machine, each with its share of the cores.

    Args:
        jobs: the number of runs at a time.
    """
    return lambda: Worker(max(1, (os.cpu_count() or 1) // jobs) if jobs > 1 else None)


class Hands(ABC):
    """Runs several hands until no run is left; a subclass says which runs there are.

    ``ready``, ``begun`` and ``ended`` are called one at a time, from any thread.

    Args:
        jobs: the number of runs at a time.
        hire: returns one more hand.
        logs: the folder for the output of the runs.
    """

    def __init__(self, jobs: int, hire: Hire, logs: Path) -> None:
        self.jobs, self.hire, self.logs = jobs, hire, logs
        self.running: set[str] = set()
        self.changed = threading.Condition()
        self.workers: list[Hand] = []
        self.stopped = False
        self.error: Exception | None = None

    @abstractmethod
    def ready(self) -> Sequence[Run]:
        """The runs that can be made now; runs under way may be among them."""

    @abstractmethod
    def place(self, run: Run) -> Path:
        """The folder or file for a run's result."""

    @abstractmethod
    def begun(self, run: Run) -> None:
        """Called when a run begins."""

    @abstractmethod
    def ended(self, run: Run, error: str) -> None:
        """Called when a run has ended, with the reason if it failed."""

    def make(self) -> None:
        """Make every run; a failed run does not stop the others."""
        self.logs.mkdir(parents=True, exist_ok=True)
        threads = [threading.Thread(target=self._serve) for _ in range(self.jobs)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:
            try:
                self._stop()
                closing = [threading.Thread(target=worker.close) for worker in self.workers]  # all at the same time
                for thread in closing:
                    thread.start()
                for thread in (*closing, *threads):
                    if thread.ident is not None:  # a signal may come before all have started
                        thread.join()
            except BaseException:  # a second signal
                for worker in self.workers:
                    worker.kill()
                raise
            raise
        if self.error is not None:
            raise self.error

    def _serve(self) -> None:
        """One thread: hires a worker, and gives it runs until none is left."""
        worker: Hand | None = None
        try:
            while run := self._take():
                if worker is None or not worker.alive:
                    if worker is not None:
                        worker.close()
                    worker = self._hire()
                error = worker.make(run, self.place(run), self.logs / f"{run.name}.txt")
                with self.changed:
                    self.running.discard(run.name)
                    self.ended(run, error)
                    self.changed.notify_all()
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
                ready = [run for run in self.ready() if run.name not in self.running]
                if ready:
                    self.running.add(ready[0].name)
                    self.begun(ready[0])
                    return ready[0]
                if not self.running:
                    return None
                self.changed.wait()
        return None
