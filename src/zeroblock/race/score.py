"""The score of a heat: dev against seconds and forward passes, read from its line of ``heats.jsonl``."""

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
        step: the number of steps taken.
        forwards: forward passes of training so far.
        seconds: seconds of training so far.
        dev: the metric on dev.
        loss: the loss on dev.
    """

    step: int
    forwards: int
    seconds: float
    dev: float
    loss: float


@dataclass(frozen=True)
class Score:
    """The result of a heat.

    Args:
        entrant: the entrant's name in the race.
        method: the entrant's method.
        lr: the learning rate; None if the method found its own.
        seed: the seed of data and noise.
        points: the evaluations, by step; the first is before training.
        best: the evaluation that dev selects.
        test: the metric on test at that step; NaN for a try.
        metric: the name of the metric on test.
        dev_metric: the name of the metric on dev.
        n: the numbers of dev and test examples.
        steps: the number of steps taken.
        forwards: forward passes of training.
        seconds: seconds of training.
        evaluating: seconds of evaluation, which are not on the clock.
        about: dtype, machine, versions and date.
        caution: what makes the result worse than the method is, with the setting that mends it; empty if nothing does.
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
    caution: str = ""

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Score:
        """Read a heat's result.

        Args:
            line: the runner's line; a bad one raises a LookupError, TypeError, ValueError or StopIteration.
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
            {name: str(line[name]) for name in ("dtype", "machine", "versions", "date")}, str(line.get("caution", "")),
        )  # fmt: skip


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


@dataclass(frozen=True)
class Band:
    """A curve over seeds.

    Args:
        x: (n,) positions along the x axis.
        mean: (n,) the mean over the seeds.
        spread: (n,) the sample standard deviation; zeros for one seed.
    """

    x: NDArray[np.float64]
    mean: NDArray[np.float64]
    spread: NDArray[np.float64]


def band(scores: Sequence[Score], against: str, of: str) -> Band | None:
    """Average the curves of an entrant's runners; None if none has two finite evaluations.

    Seeds are evaluated at different seconds and forward passes, so each curve is interpolated between its points, and
    the mean ends where the shortest curve ends.

    Args:
        scores: the scores of one entrant.
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
    """The seconds or passes until each runner's dev loss reached a mark; runners that never did are left out.

    Args:
        scores: the scores of one entrant.
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
    """The dev loss of a heat after some forward passes, interpolated between evaluations.

    Args:
        score: the heat's score.
        forwards: the number of passes; outside the range from the first evaluation in training to the last finite one
            the loss is NaN.
    """
    finite = [point for point in score.points if math.isfinite(point.loss)]
    trained = [point for point in finite if point.step]
    if not trained or not trained[0].forwards <= forwards <= trained[-1].forwards:
        return math.nan
    return float(np.interp(forwards, [point.forwards for point in finite], [point.loss for point in finite]))
