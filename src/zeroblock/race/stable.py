"""The stable: the processes that run the heats of one or more races, a fixed number at a time."""

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
"""Guesses for the plan: the time until the first heat begins, and a heat's time besides its steps."""


class Stable(Hands):
    """Runs the remaining heats of some races, in the order of the races.

    Args:
        courses: the races.
        folder: the folder for the output of the heats, under ``log``.
        jobs: heats at a time.
        hire: returns one more process.
        tell: called when a heat begins or ends, one call at a time.
        until: the time after which no more heats begin, on the monotonic clock.
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
    """The number of heats left in a race, and roughly the seconds they take with its jobs, without the start."""
    heats = list(course.left())
    total = sum(duration(heat.more["seconds"]) if heat.config.trains else BETWEEN_S for heat in heats)
    return len(heats), total / course.race.jobs


def duration(seconds: float) -> float:
    """The approximate seconds that a heat takes, from its seconds of training."""
    return seconds + warm_up_seconds(seconds) + BETWEEN_S
