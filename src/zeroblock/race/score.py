"""The score of a runner: dev against seconds and forward passes, read from its run folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..evaluate.evaluator import Evaluation
from ..evaluate.measurement import read_measurements
from ..report.summary import select
from ..sweep.clock import CLOCK, read, seconds_at
from ..sweep.plan import Run
from .plan import forwards

SLACK = 0.1
"""Fraction of the minutes by which an evaluation may be late and still count."""


@dataclass(frozen=True)
class Point:
    """One evaluation of a runner.

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
    """How a runner did.

    Args:
        method: its method.
        lr: its learning rate.
        seed: of data and noise.
        points: the evaluations that count, by step.
        best: the one that dev selects; None if only the start was evaluated.
        test: the metric on test at that step; NaN without one.
        metric: its name.
        n: the numbers of dev and test examples.
        seconds: of training in all, those that do not count among them.
        evaluating: seconds of evaluation in all, which the clock leaves out.
        about: machine, versions and date.
    """

    method: str
    lr: float
    seed: int
    points: tuple[Point, ...]
    best: Point | None
    test: float
    metric: str
    n: tuple[int, int]
    seconds: float
    evaluating: float
    about: Mapping[str, str]

    @classmethod
    def read(cls, run: Run, folder: Path, limit: float) -> Score | None:
        """Read the score of a run folder; None if it has no evaluation yet.

        Args:
            run: the runner.
            folder: its folder.
            limit: seconds of training; what was measured more than a tenth later does not count.
        """
        try:
            measured = [one for _, one in read_measurements(folder / "metrics.jsonl")]
        except ValueError:  # a damaged line: the run measures it again when it is resumed
            measured = []
        if not measured:
            return None
        clock, each = read(folder / CLOCK), forwards(run.config)
        splits: dict[str, dict[int, Evaluation]] = {"dev": {}, "test": {}}
        for one in measured:
            splits[one.split][one.step] = one.evaluation
        points = [
            Point(step, each * step, seconds_at(clock, step), dev.value, dev.loss)
            for step, dev in sorted(splits["dev"].items())
        ]
        counted = [point for point in points if point.seconds <= (1 + SLACK) * limit]
        later = {point.step: splits["dev"][point.step] for point in counted if point.step}
        chosen = select(later, run.config.objective == "loss") if later else None
        best = next((point for point in counted if point.step == chosen), None)
        test = splits["test"].get(best.step) if best else None
        sizes = tuple(next((one.n for one in splits[name].values()), 0) for name in ("dev", "test"))
        return cls(
            run.config.method,
            run.config.lr or 0.0,
            run.config.seed,
            tuple(counted),
            best,
            test.value if test else math.nan,
            measured[0].evaluation.metric,
            (sizes[0], sizes[1]),
            points[-1].seconds if points else 0.0,
            math.fsum(one.evaluation.seconds for one in measured),
            _about(folder),
        )


def _about(folder: Path) -> dict[str, str]:
    """The machine, the versions and the day of a run, where its folder tells them."""
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("zeroblock", "python", "torch"))
        return {"machine": str(about["machine"]), "versions": versions, "date": str(about["began"])[:10]}
    except (OSError, ValueError, LookupError, TypeError):
        return {"machine": "", "versions": "", "date": ""}


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


def first_to(scores: Sequence[Score], loss: float, of: str) -> list[float]:
    """Where each runner's dev loss was first as low as a loss; runners that never got there are left out.

    Args:
        scores: of one method.
        loss: the mark.
        of: ``seconds`` or ``forwards``.
    """
    found = []
    for score in scores:
        there = next((point for point in score.points if point.step and point.loss <= loss), None)
        if there is not None:
            found.append(float(getattr(there, of)))
    return found
