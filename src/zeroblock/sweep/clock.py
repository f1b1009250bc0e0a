"""The clock of a run: seconds of training by step, without evaluations, replays and the time between sittings."""

from __future__ import annotations

import csv
import itertools
import math
import time
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .. import atomic

if TYPE_CHECKING:
    from ..evaluate.measurement import Measurement
    from ..report.view import Progress, View

CLOCK = "clock.csv"
"""The file of a run's folder: ``step,seconds``."""
EVERY_S = 0.25
"""Seconds between two rows; a run that is killed loses at most this much of its clock."""


class Clock:
    """A view that shows a run in another view, and writes the seconds of training that its steps took.

    It stops during evaluations, and starts after the first step of a sitting, which loads and compiles what the
    others use.  A run that is resumed goes on from the seconds of the step it has reached.

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
        """Take up the clock at a step; rows of later steps, which the journal lost, are dropped."""
        kept = [row for row in read(self.path) if row[0] <= step]
        self._seconds = kept[-1][1] if kept else 0.0
        atomic.write(self.path, "step,seconds\n" + "".join(f"{at},{seconds:.4f}\n" for at, seconds in kept))

    def _write(self) -> None:
        self._written = self._step, self._seconds
        with atomic.append(self.path) as file:
            file.write(f"{self._step},{self._seconds:.4f}\n".encode())

    def _pause(self) -> None:
        """Leave out the time until the next step begins."""
        if self._running and self._written != (self._step, self._seconds):
            self._write()
        self._running = False
        self._go()

    def _go(self) -> None:
        """Let the next step begin now; the first one of a sitting is not timed."""
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
    """Read the rows of a clock, up to the first that is damaged; a file that is missing has none."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [(int(row["step"]), float(row["seconds"])) for row in csv.DictReader(file) if row["seconds"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, csv.Error):
        return []
    later = itertools.pairwise([(0, 0.0), *rows])
    return [now for before, now in itertools.takewhile(lambda pair: pair[0] <= pair[1], later)]


@dataclass(frozen=True)
class Pace:
    """How fast a method steps: ``seconds = start + steps / rate``.

    Args:
        start: seconds that the first steps take more than the others, for compiling and capturing.
        rate: steps per second after that.
    """

    start: float
    rate: float

    @classmethod
    def of(cls, rows: list[tuple[int, float]]) -> Pace | None:
        """Find the pace of a run by the second half of its clock; None for a clock without a step.

        >>> Pace.of([(1, 2.0), (11, 3.0), (21, 4.0)])
        Pace(start=1.9, rate=10.0)
        """
        if not rows or rows[-1][1] <= 0:
            return None
        last, seconds = rows[-1]
        middle, then = next(row for row in rows if row[1] >= seconds / 2)
        if last == middle or seconds == then:
            return cls(0.0, last / seconds)
        rate = (last - middle) / (seconds - then)
        return cls(max(0.0, round(seconds - last / rate, 6)), rate)

    def steps(self, seconds: float) -> int:
        """The number of steps that fit into some seconds, at least one."""
        return max(1, math.floor((seconds - self.start) * self.rate))


def seconds_at(rows: list[tuple[int, float]], step: int) -> float:
    """The seconds of training up to a step, in proportion between two rows.

    >>> seconds_at([(10, 1.0), (20, 3.0)], 15), seconds_at([(10, 1.0)], 5), seconds_at([], 0)
    (2.0, 0.5, 0.0)
    """
    table = [(0, 0.0), *rows]
    after = bisect_right([at for at, _ in table], step)
    low, high = table[after - 1], table[min(after, len(table) - 1)]
    share = (step - low[0]) / (high[0] - low[0]) if high[0] > low[0] else 0.0
    return low[1] + share * (high[1] - low[1])
