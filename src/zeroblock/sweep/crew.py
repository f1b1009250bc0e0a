"""The crew of a sweep: makes all its runs, several at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .hands import Hands, Hire, local
from .outcome import Outcome, due, folder_of, read
from .plan import Run, Sweep

Tell = Callable[[str, Run, Outcome | None, str], None]
"""Called with "begin", "end" or "fail", the run, its outcome, and the reason of a failure."""


class Crew(Hands):
    """Makes all runs of a sweep; a failure is noted in ``failed`` and stops no other run.

    Args:
        sweep: the sweep to make.
        folder: holds the run folders under ``runs`` and their output under ``log``.
        jobs: the number of runs at a time.
        tell: called when a run begins or ends, one call at a time.
        hire: returns one more hand; by default a process on this machine.
    """

    def __init__(self, sweep: Sweep, folder: Path, jobs: int, tell: Tell, hire: Hire | None = None) -> None:
        super().__init__(jobs, hire or local(jobs), folder / "log")
        self.sweep, self.runs, self.tell = sweep, folder / "runs", tell
        self.outcomes = read(sweep, self.runs)
        self.failed: dict[str, str] = {}

    def make(self) -> None:
        """Make every run that is not finished."""
        self.runs.mkdir(parents=True, exist_ok=True)
        super().make()

    def ready(self) -> list[Run]:
        return due(self.sweep, self.outcomes, self.failed)

    def place(self, run: Run) -> Path:
        return folder_of(run, self.runs)

    def begun(self, run: Run) -> None:
        self.tell("begin", run, None, "")

    def ended(self, run: Run, error: str) -> None:
        outcome = None if error else Outcome.read(self.place(run))
        if outcome is not None:
            self.outcomes[run.name] = outcome
            self.tell("end", run, outcome, "")
        elif not self.stopped:
            self.failed[run.name] = error or "it ended before its last step"
            self.tell("fail", run, None, self.failed[run.name])
