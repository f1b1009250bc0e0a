"""The score of a heat: dev against seconds and forward passes, as its line of ``heats.jsonl`` has them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Point:
    """One evaluation on dev.

    Args:
        step: how many steps had been taken.
        forwards: forward passes of training up to there.
        seconds: of training up to there.
        dev: the metric on dev.
        loss: on dev.
    """

    step: int
    forwards: int
    seconds: float
    dev: float
    loss: float


@dataclass(frozen=True)
class Score:
    """How a heat went.

    Args:
        entrant: its name in the race.
        method: its method.
        lr: its learning rate; None where the method found its own.
        seed: of data and noise.
        points: the evaluations, by step; the first is before training.
        best: the one that dev selects.
        test: the metric on test at that step; NaN for a try.
        metric: its name.
        dev_metric: the name of the one on dev.
        n: the numbers of dev and test examples.
        steps: in all.
        forwards: forward passes of training.
        seconds: of training.
        evaluating: seconds of evaluation, which are not on the clock.
        about: dtype, machine, versions and date.
    """

    entrant: str
    method: str
    lr: float | None
    seed: int
    points: tuple[Point, ...]
    best: Point
    test: float
    metric: str
    dev_metric: str
    n: tuple[int, int]
    steps: int
    forwards: int
    seconds: float
    evaluating: float
    about: Mapping[str, str]

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Score:
        """Read a heat's result.

        Args:
            line: as the runner wrote it; a LookupError, TypeError or ValueError says what is wrong with it.
        """
        points = tuple(
            Point(int(one["step"]), int(one["forwards"]), _number(one["seconds"]), _number(one["dev"]),
                  _number(one["loss"]))
            for one in line["points"]
        )  # fmt: skip
        best = next(point for point in points if point.step == line["selected"])
        lr = line["lr"]
        return cls(
            str(line["entrant"]), str(line["method"]), None if lr is None else float(lr), int(line["seed"]), points,
            best, _number(line["test"]), str(line["metric"]), str(line["dev_metric"]),
            (int(line["dev_n"]), int(line["test_n"])), int(line["steps"]), int(line["forwards"]),
            _number(line["seconds"]), _number(line["evaluating"]),
            {name: str(line[name]) for name in ("dtype", "machine", "versions", "date")},
        )  # fmt: skip


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


@dataclass(frozen=True)
class Band:
    """A curve over seeds.

    Args:
        x: (n,) where.
        mean: (n,) over the seeds.
        spread: (n,) the sample standard deviation; zeros for one seed.
    """

    x: NDArray[np.float64]
    mean: NDArray[np.float64]
    spread: NDArray[np.float64]


def band(scores: Sequence[Score], against: str, of: str) -> Band | None:
    """Average the curves of a method's runners; None if none has two evaluations.

    The seeds are evaluated at the same steps and forward passes, but not at the same seconds: there, each curve is
    drawn through its points, and they are averaged over the seconds that all of them reached.

    Args:
        scores: of one method.
        against: ``seconds`` or ``forwards``.
        of: ``dev`` or ``loss``.
    """
    curves = []
    for score in scores:
        finite = [point for point in score.points if math.isfinite(getattr(point, of))]
        if len(finite) > 1:
            curves.append(([getattr(p, against) for p in finite], [getattr(p, of) for p in finite]))
    if not curves:
        return None
    end = min(x[-1] for x, _ in curves)
    longest = max(curves, key=lambda curve: len(curve[0]))[0]
    x = np.unique(np.array([min(value, end) for value in longest], dtype=np.float64))
    rows = np.stack([np.interp(x, at, value) for at, value in curves])
    spread = rows.std(axis=0, ddof=1) if len(rows) > 1 else np.zeros(len(x))
    return Band(x, rows.mean(axis=0), spread)


def first_to(scores: Sequence[Score], marks: Mapping[int, float], of: str) -> list[float]:
    """Where each runner's dev loss was first as low as a mark; runners that never got there are left out.

    Args:
        scores: of one entrant.
        marks: losses by seed, because each seed has its own data.
        of: ``seconds`` or ``forwards``.
    """
    found = []
    for score in scores:
        mark = marks.get(score.seed, -math.inf)
        there = next((point for point in score.points if point.step and point.loss <= mark), None)
        if there is not None:
            found.append(float(getattr(there, of)))
    return found


def loss_at(score: Score, forwards: float) -> float:
    """The dev loss of a heat after some forward passes, in proportion between two evaluations.

    Args:
        score: of the heat.
        forwards: how many; NaN comes back for more than it took, and for fewer than before its first evaluation.
    """
    finite = [point for point in score.points if math.isfinite(point.loss)]
    trained = [point for point in score.points if point.step]
    if not finite or not trained or not trained[0].forwards <= forwards <= trained[-1].forwards:
        return math.nan
    return float(np.interp(forwards, [point.forwards for point in finite], [point.loss for point in finite]))
