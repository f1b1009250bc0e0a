"""The tables of a race: ``race.md`` for people, ``race.csv`` with every evaluation, ``runners.csv``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import atomic
from ..errors import shown
from ..sweep.grid import show
from ..sweep.table import MISSING, Mean, csv_of
from .course import Course
from .score import SLACK, Score, first_to

SHORT = ("method", "lr", "test %", "dev %", "dev loss", "steps", "passes", "seconds")
"""The columns that fit on a terminal; the others are in ``race.md``."""
HEAD = ("method", "lr", "test", "dev", "dev loss", "steps", "forward passes", "seconds", "evaluation")


@dataclass(frozen=True)
class Standing:
    """A method at the end of a race; means over its seeds.

    Args:
        method: its name.
        lr: the one that dev chose.
        test: the metric on test, at the steps that dev selected.
        dev: the metric on dev, there.
        loss: on dev, there.
        steps: per runner.
        forwards: forward passes per runner.
        seconds: of training per runner.
        evaluating: seconds of evaluation per runner.
        to_seconds: seconds of training until dev loss was as low as the yardstick's best.
        to_forwards: forward passes until then.
    """

    method: str
    lr: float
    test: Mean
    dev: Mean
    loss: Mean
    steps: Mean
    forwards: Mean
    seconds: Mean
    evaluating: Mean
    to_seconds: Mean
    to_forwards: Mean


def standings(scores: Mapping[str, Sequence[Score]]) -> list[Standing]:
    """Rank the methods that have a score, the highest test first.

    Args:
        scores: by method; the first that has any is the yardstick.
    """
    ran = {name: [one for one in some if one.best] for name, some in scores.items()}
    ran = {name: some for name, some in ran.items() if some}
    if not ran:
        return []
    mark = Mean.of([one.best.loss for one in next(iter(ran.values())) if one.best]).value
    found = [_standing(name, some, mark) for name, some in ran.items()]
    return sorted(found, key=lambda one: -math.inf if math.isnan(one.test.value) else one.test.value, reverse=True)


def _standing(method: str, scores: Sequence[Score], mark: float) -> Standing:
    best = [one.best for one in scores if one.best]
    last = [one.points[-1] for one in scores]
    return Standing(
        method,
        scores[0].lr,
        Mean.of([one.test for one in scores if not math.isnan(one.test)]),
        Mean.of([point.dev for point in best]),
        Mean.of([point.loss for point in best]),
        Mean.of([float(point.step) for point in last]),
        Mean.of([float(point.forwards) for point in last]),
        Mean.of([point.seconds for point in last]),
        Mean.of([one.evaluating for one in scores]),
        Mean.of(first_to(scores, mark, "seconds")),
        Mean.of(first_to(scores, mark, "forwards")),
    )


def cells(one: Standing) -> list[str]:
    """The cells of a method's row, for people."""
    return [
        one.method,
        show(one.lr),
        _percent(one.test),
        _percent(one.dev),
        _number(one.loss, 4),
        f"{one.steps.value:,.0f}",
        f"{one.forwards.value:,.0f}",
        _number(one.seconds, 1),
        _number(one.evaluating, 1),
        _number(one.to_seconds, 1) if one.to_seconds.count else MISSING,
        f"{one.to_forwards.value:,.0f}" if one.to_forwards.count else MISSING,
    ]


def head(course: Course, scores: Mapping[str, Sequence[Score]]) -> list[str]:
    """The heads of the columns."""
    first = next((name for name, some in scores.items() if some), course.race.entrants[0].method)
    some = next((one for group in scores.values() for one in group), None)
    metric = some.metric if some else "metric"
    named = {"test": f"test {metric}", "dev": f"dev {metric}", "evaluation": "evaluation (s)"}
    return [*(named.get(name, name) for name in HEAD), f"seconds to {first}'s best", "forward passes to it"]


def write(course: Course, command: str) -> None:
    """Write the tables, each atomically.

    Args:
        course: the race so far.
        command: that makes it.
    """
    scores = course.scores()
    atomic.write(course.folder / "race.md", markdown(course, scores, command))
    if points := _points(course, scores):
        atomic.write(course.folder / "race.csv", csv_of(points))
        atomic.write(course.folder / "runners.csv", csv_of(_runners(course, scores)))


def markdown(course: Course, scores: Mapping[str, Sequence[Score]], command: str) -> str:
    """Write the table for people.

    Args:
        course: the race so far.
        scores: by method.
        command: that makes it.
    """
    race, names = course.race, head(course, scores)
    lines = [f"# {title(course)}", "", f"    {shown(command, 2000)}", ""]
    lines += [*rules(course, scores), ""]
    lines += ["| " + " | ".join(names) + " |", "|---|" + "---:|" * (len(names) - 1)]
    lines += ["| " + " | ".join(cells(one)) + " |" for one in standings(scores)]
    lines += ["", "![dev against seconds and against forward passes](race.svg)"]
    notes = [f"- {name}: {shown(why, 2000)}" for name, why in {**course.out, **course.failed}.items()]
    notes += uneven(scores, race.seconds)
    left = {one.method: race.seeds - len([s for s in scores[one.method] if s.best]) for one in race.entrants}
    notes += [
        f"- {name}: {count} of {race.seeds} runners to go"
        for name, count in left.items()
        if count and name not in course.out
    ]
    lines += ["", "## Notes", "", *notes] if notes else []
    return "\n".join(lines) + "\n"


def title(course: Course) -> str:
    """Name the race."""
    settings = course.race.settings | course.race.overrides
    return f"A race on {Path(settings['task']).stem}, {Path(settings['model']).name}"


def rules(course: Course, scores: Mapping[str, Sequence[Score]]) -> list[str]:
    """Say how the race was run, in whole sentences."""
    race = course.race
    sizes = next((one.n for group in scores.values() for one in group), None)
    seeds = "one seed" if race.seeds == 1 else f"{race.seeds} seeds (mean ± sample standard deviation)"
    tried = len(race.entrants[0].lrs)
    chosen = (
        f"Each method tried {tried} learning rates on dev, with the first seed, for {race.share:.0%} of the time; "
        "the best went on. "
        if tried > 1
        else ""
    )
    counted = f" (n {sizes[0]} dev, {sizes[1]} test)" if sizes else ""
    return [
        f"Every runner planned {race.minutes:g} min of training, evaluations not counted, with {seeds}. "
        f"{chosen}Test is reported at the step that dev selected{counted}; nothing was chosen by test.",
        "",
        "A forward pass is one batch at one point: a two-sided step is two, also where a forked pass measures both. "
        "A step of ft counts as three, for its backward pass takes about as long as two.",
    ]


def uneven(scores: Mapping[str, Sequence[Score]], seconds: float) -> list[str]:
    """Say which methods had clearly less or more time than the others."""
    notes = []
    for name, group in scores.items():
        took = [one.seconds for one in group if one.best]
        if any(abs(one / seconds - 1) > SLACK for one in took):
            times = " to ".join(dict.fromkeys(f"{one:.0f}" for one in (min(took), max(took))))
            notes.append(
                f"- {name}: the plan was {seconds:.0f} s of training, and its runners took {times} s, because "
                "the machine's speed changed after the pace was measured; evaluations after "
                f"{(1 + SLACK) * seconds:.1f} s do not count"
            )
    return notes


def _points(course: Course, scores: Mapping[str, Sequence[Score]]) -> list[dict[str, Any]]:
    """One row per evaluation."""
    rows = []
    for score in (one for group in scores.values() for one in group):
        for point in score.points:
            selected = point == score.best
            rows.append(
                _common(course, score)
                | {"step": point.step, "forwards": point.forwards, "seconds": point.seconds}
                | {"metric": score.metric, "dev": point.dev, "dev_loss": point.loss, "selected": selected}
                | {"test": score.test if selected else math.nan, "dev_n": score.n[0], "test_n": score.n[1]}
                | dict(score.about)
            )
    return rows


def _runners(course: Course, scores: Mapping[str, Sequence[Score]]) -> list[dict[str, Any]]:
    """One row per runner."""
    rows = []
    tried = {one.method: " ".join(show(lr) for lr in one.lrs) for one in course.race.entrants}
    for score in (one for group in scores.values() for one in group):
        best = score.best
        rows.append(
            _common(course, score)
            | {"lrs_tried": tried[score.method], "steps": score.points[-1].step, "forwards": score.points[-1].forwards}
            | {"seconds": score.points[-1].seconds, "evaluation_seconds": score.evaluating, "metric": score.metric}
            | {"selected_step": best.step if best else "", "selected_seconds": best.seconds if best else math.nan}
            | {"dev": best.dev if best else math.nan, "dev_loss": best.loss if best else math.nan}
            | {"test": score.test, "dev_n": score.n[0], "test_n": score.n[1]}
            | dict(score.about)
        )
    return rows


def _common(course: Course, score: Score) -> dict[str, Any]:
    settings = course.race.settings | course.race.overrides
    names = {"model": Path(settings["model"]).name, "task": Path(settings["task"]).name}
    return names | {"minutes": course.race.minutes, "method": score.method, "lr": score.lr, "seed": score.seed}


def _percent(mean: Mean) -> str:
    return _number(Mean(100 * mean.value, 100 * mean.spread, mean.count), 1)


def _number(mean: Mean, digits: int) -> str:
    if not mean.count or math.isnan(mean.value):
        return MISSING
    spread = "" if math.isnan(mean.spread) else f" ± {mean.spread:.{digits}f}"
    return f"{mean.value:.{digits}f}{spread}"
