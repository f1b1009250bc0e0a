"""The clock of a run: seconds of training by step, without evaluations, replays and the time between sessions."""

from __future__ import annotations

import contextlib
import csv
import itertools
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .. import atomic

if TYPE_CHECKING:
    from ..evaluate.measurement import Measurement
    from ..report.view import Progress, View

CLOCK = "clock.csv"
"""The file in a run's folder, with rows of ``step,seconds``."""
EVERY_S = 0.25
"""Seconds between two rows; a run that is killed loses at most this much of its clock."""


class Clock:
    """A view that shows a run in another view, and writes the seconds of training that its steps took.

    It stops during evaluations, and starts after the first step of a session, which loads and compiles what the
    others use.  A resumed run continues from the seconds of the step it has reached.

    Args:
        view: shows the run.
        path: the file to write.
    """

    def __init__(self, view: View, path: Path) -> None:
        self.view, self.path = view, path
        self._step, self._seconds = 0, 0.0
        self._since: float | None = None
        self._running = False
        self._written: tuple[int, float] | None = None

    def step(self, progress: Progress) -> None:
        """Count the time of a step."""
        now = time.perf_counter()
        if self._written is None:
            self._begin(progress.step - 1)
        self._seconds += 0.0 if self._since is None else now - self._since
        self._since, self._step, self._running = now, progress.step, True
        if self._written is None or self._seconds - self._written[1] >= EVERY_S:
            self._write()
        self.view.step(progress)

    def _begin(self, step: int) -> None:
        """Continue the clock at a step; rows of later steps, which the journal lost, are dropped."""
        kept = [row for row in read(self.path) if row[0] <= step]
        self._seconds = kept[-1][1] if kept else 0.0
        atomic.write(self.path, "step,seconds\n" + "".join(f"{at},{seconds:.4f}\n" for at, seconds in kept))

    def _write(self) -> None:
        self._written = self._step, self._seconds
        with atomic.append(self.path) as file:
            file.write(f"{self._step},{self._seconds:.4f}\n".encode())

    def _pause(self) -> None:
        """Exclude the time until the next step begins."""
        if self._running and self._written != (self._step, self._seconds):
            self._write()
        self._running = False
        self._go()

    def _go(self) -> None:
        """Start timing the next step now; the first step of a session is not timed."""
        if self._since is not None:
            self._since = time.perf_counter()

    def note(self, text: str) -> None:
        self.view.note(text)

    def replaying(self, step: int, steps: int) -> None:
        self._pause()
        self.view.replaying(step, steps)

    def evaluating(self, step: int, split: str, done: int, n: int) -> None:
        self._pause()
        self.view.evaluating(step, split, done, n)

    def measured(self, measurement: Measurement) -> None:
        self._pause()
        self.view.measured(measurement)
        self._go()

    def baseline(self, measurement: Measurement) -> None:
        self.view.baseline(measurement)

    def close(self) -> None:
        self._pause()
        self.view.close()


def read(path: Path) -> list[tuple[int, float]]:
    """Read the rows of a clock up to the first that is damaged or out of order; a missing file has none."""
    rows: list[tuple[int, float]] = []
    damage = (ValueError, KeyError, TypeError, csv.Error)
    with (
        contextlib.suppress(FileNotFoundError, *damage),
        path.open(encoding="utf-8", errors="replace", newline="") as file,
    ):
        for row in csv.DictReader(file):
            rows.append((int(row["step"]), float(row["seconds"])))
    ordered = itertools.takewhile(
        lambda pair: pair[0][0] <= pair[1][0] and pair[0][1] <= pair[1][1] < math.inf,
        itertools.pairwise([(0, 0.0), *rows]),
    )
    return [row for _, row in ordered]
