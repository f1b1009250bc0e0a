"""The stable: the processes that run the heats of one race or of several, always as many at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..sweep.hands import Hands, Hire
from ..sweep.plan import Run
from .course import Course
from .plan import warm_up_seconds
from .score import Score

Tell = Callable[[str, Course, Run, Score | None, str], None]
"""Called with "begin", "end" or "fail", the race, the heat, its score, and the reason of a failure."""
START_S, BETWEEN_S = 12.0, 1.5
"""Guesses for the plan: until the first heat begins, and what a heat takes beside its steps."""


class Stable(Hands):
    """Runs the heats that are left of some races, those of the first race first.

    Args:
        courses: the races.
        folder: for what the heats print, under ``log``.
        jobs: heats at a time.
        hire: gives one more process.
        tell: is called at every begin and end, one call at a time.
        until: when to begin no more heats, on the monotonic clock.
    """

    def __init__(
        self, courses: Sequence[Course], folder: Path, jobs: int, hire: Hire, tell: Tell, until: float = math.inf
    ) -> None:
        super().__init__(jobs, hire, folder / "log")
        self.courses, self.tell, self.until = courses, tell, until
        self._of: dict[str, Course] = {}

    def ready(self) -> list[Run]:
        if time.monotonic() >= self.until:
            return []
        for course in self.courses:
            found = [heat for heat in course.heats() if heat.name not in self.running]
            if found:
                self._of[found[0].name] = course
                return found[:1]
        return []

    def place(self, run: Run) -> Path:
        return self._of[run.name].place(run)

    def begun(self, run: Run) -> None:
        self.tell("begin", self._of[run.name], run, None, "")

    def ended(self, run: Run, error: str) -> None:
        if self.stopped:
            return
        course = self._of[run.name]
        score = course.end(run, error)
        self.tell("end" if score else "fail", course, run, score, course.failed.get(run.name, ""))


def expected_seconds(course: Course) -> tuple[int, float]:
    """The heats that are left of a race, and about how many seconds they take with its jobs, without the start."""
    heats = list(course.left())
    total = sum(duration(heat.more["seconds"]) if heat.config.trains else BETWEEN_S for heat in heats)
    return len(heats), total / course.race.jobs


def duration(seconds: float) -> float:
    """About how many seconds a heat with so many seconds of training takes."""
    return seconds + warm_up_seconds(seconds) + BETWEEN_S
