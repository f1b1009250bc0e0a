"""The tables of a race: ``race.md`` for people, ``race.csv`` with every evaluation, ``runners.csv``."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .. import atomic
from ..errors import shown
from ..sweep.grid import show
from ..sweep.table import MISSING, Mean, csv_of
from .course import Course
from .plan import AUTO, ZERO_SHOT
from .score import Score, first_to, loss_at

SHORT = ("entrant", "lr", "test %", "dev %", "dev loss", "steps", "passes", "seconds")
"""The columns that fit on a terminal; the others are in ``race.md``."""
OVERTIME = 1.1
"""The notes list runners that trained for longer than planned by more than this factor."""
HEAD = ("entrant", "lr", "test", "dev", "dev loss", "steps", "forward passes", "seconds", "evaluation")


@dataclass(frozen=True)
class Standing:
    """An entrant's result in a race, as means over its seeds.

    Args:
        entrant: the entrant's name.
        lr: the learning rate that dev chose; None if the method found its own.
        test: the metric on test, at the steps that dev selected.
        dev: the metric on dev, at these steps.
        loss: the loss on dev, at these steps.
        steps: steps per runner.
        forwards: forward passes per runner.
        seconds: seconds of training per runner.
        evaluating: seconds of evaluation per runner.
        to_seconds: seconds of training until dev loss was as low as the yardstick's best with the same seed.
        to_forwards: forward passes until then.
        loss_at_passes: dev loss after ``passes`` forward passes; empty if a seed took fewer or was measured later.
        passes: the number of forward passes that at least half of the entrants took.
    """

    entrant: str
    lr: float | None
    test: Mean
    dev: Mean
    loss: Mean
    steps: Mean
    forwards: Mean
    seconds: Mean
    evaluating: Mean
    to_seconds: Mean
    to_forwards: Mean
    loss_at_passes: Mean
    passes: int


def standings(scores: Mapping[str, Sequence[Score]]) -> list[Standing]:
    """Rank the entrants that have a score, the highest test first.

    Args:
        scores: the scores by entrant; the first entrant with a trained runner is the yardstick.
    """
    ran = {name: some for name, some in scores.items() if some}
    trained = [some for some in ran.values() if some[0].steps]
    marks = {one.seed: one.best.loss for one in trained[0]} if trained else {}
    fewest = [min(one.forwards for one in some) for some in trained]
    passes = statistics.median_low(fewest) if fewest else 0  # an entrant with slow steps must not decide for all
    found = [_standing(name, some, marks, passes) for name, some in ran.items()]
    return sorted(found, key=lambda one: -math.inf if math.isnan(one.test.value) else one.test.value, reverse=True)


def _standing(name: str, scores: Sequence[Score], marks: Mapping[int, float], passes: int) -> Standing:
    at_passes = [loss_at(one, passes) for one in scores if one.steps]
    return Standing(
        name,
        scores[0].lr,
        Mean.of([one.test for one in scores]),
        Mean.of([one.best.dev for one in scores]),
        Mean.of([one.best.loss for one in scores]),
        Mean.of([float(one.steps) for one in scores]),
        Mean.of([float(one.forwards) for one in scores]),
        Mean.of([one.seconds for one in scores]),
        Mean.of([one.evaluating for one in scores]),
        Mean.of(first_to(scores, marks, "seconds")),
        Mean.of(first_to(scores, marks, "forwards")),
        Mean.of([] if any(map(math.isnan, at_passes)) else at_passes),  # all seeds, or none
        passes,
    )


def cells(one: Standing, seeds: int = 0) -> list[str]:
    """The cells of an entrant's row, for people; means over fewer seeds say over how many.

    Args:
        one: the entrant's result.
        seeds: the number of seeds of the race.
    """
    few = partial(_counted, seeds=seeds)
    rate = AUTO if one.lr is None else show(one.lr)
    return [
        one.entrant,
        rate if one.steps.value else MISSING,
        few(_percent(one.test), one.test.count),
        few(_percent(one.dev), one.dev.count),
        few(_number(one.loss, 4), one.loss.count),
        f"{one.steps.value:,.0f}",
        f"{one.forwards.value:,.0f}",
        _number(one.seconds, 1),
        _number(one.evaluating, 1),
        few(_number(one.to_seconds, 1), one.to_seconds.count),
        few(f"{one.to_forwards.value:,.0f}" if one.to_forwards.count else MISSING, one.to_forwards.count),
        _number(one.loss_at_passes, 4),
    ]


def head(course: Course) -> list[str]:
    """The column headings."""
    scores = course.scores
    yardstick = next((name for name, some in scores.items() if some and some[0].steps), "the first")
    some = next((one for group in scores.values() for one in group), None)
    test, dev = (some.metric, some.dev_metric) if some else ("metric", "metric")
    named = {"test": f"test {test}", "dev": f"dev {dev}", "evaluation": "evaluation (s)"}
    passes = next((one.passes for one in standings(scores)), 0)
    last = [f"seconds to {yardstick}'s best", "forward passes to it", f"dev loss at {passes:,} passes"]
    return [*(named.get(name, name) for name in HEAD), *last]


def write(course: Course, figure: str = "race.svg") -> None:
    """Write the tables, each atomically.

    Args:
        course: the race so far.
        figure: the link to the figure in ``race.md``; empty if there is none.
    """
    atomic.write(course.folder / "race.md", markdown(course, figure))
    if points := _points(course):
        atomic.write(course.folder / "race.csv", csv_of(points))
        atomic.write(course.folder / "runners.csv", csv_of(_runners(course)))


def markdown(course: Course, figure: str = "race.svg") -> str:
    """Write the table for people.

    Args:
        course: the race so far.
        figure: the link to the figure; empty if there is none.
    """
    lines = [f"# {title(course)}", "", *(f"    {shown(line, 2000)}" for line in course.command.splitlines()), ""]
    lines += [*rules(course), "", *standings_table(course)]
    lines += ["", f"![dev against seconds and against forward passes]({figure})"] if figure else []
    if found := notes(course):
        lines += ["", "## Notes", "", *(f"- {note}" for note in found)]
    return "\n".join(lines) + "\n"


def standings_table(course: Course) -> list[str]:
    """The standings as lines of Markdown."""
    names = head(course)
    lines = ["| " + " | ".join(names) + " |", "|---|" + "---:|" * (len(names) - 1)]
    return lines + ["| " + " | ".join(cells(one, course.race.seeds)) + " |" for one in standings(course.scores)]


def title(course: Course) -> str:
    """Name the race."""
    return f"A race on {Path(course.race.task).stem}, {Path(course.race.model).name}"


def rules(course: Course) -> list[str]:
    """Say how the race was run, in whole sentences."""
    race, scores = course.race, course.scores
    sizes = next((one.n for group in scores.values() for one in group), None)
    seeds = "one seed" if race.seeds == 1 else f"{race.seeds} seeds (mean ± sample standard deviation)"
    counts = {len(one.lrs) for one in race.entrants if one.lrs[0] is not None}
    tried = max(counts, default=1)
    many = f"up to {tried}" if len(counts) > 1 else str(tried)
    best = "lowest dev loss" if race.by_loss else "highest dev metric"
    chosen = (
        f"Where lr is a number, the entrant tried {many} of them on dev, with the first seed, for {race.share:.0%} of "
        f"the time, and the one with the {best} was chosen. "
        if tried > 1
        else ""
    )
    shared = (
        f"Up to {race.jobs} runners shared the machine, so seconds are those of a shared machine, and runners that "
        "evaluate or come last leave the others more of it. "
        if race.jobs > 1
        else ""
    )
    counted = f" (n {sizes[0]} dev, {sizes[1]} test)" if sizes else ""
    return [
        f"Every runner trained for {race.seconds:g} s, evaluations not counted, with {seeds}. {shared}{chosen}"
        f"Test was measured once per runner, with the weights of the {best}{counted}; nothing was chosen by "
        f"test. With lr {AUTO} nobody set a learning rate.",
        "",
        "A forward pass is one batch at one point: a two-sided step is two, also where a forked pass measures both. "
        "A step of ft counts as three, for its backward pass takes about as long as two.",
    ]


def notes(course: Course) -> list[str]:
    """List the heats that failed, the runners that trained for too long, cautions, and the number still to run."""
    race, scores = course.race, course.scores
    reasons: dict[str, list[str]] = {}
    for name, why in course.failed.items():  # heats often fail for one reason, each with its own step
        reasons.setdefault(re.sub(r"step \d+", "", why), []).append(name)
    found = [f"{', '.join(names)} failed: {shown(course.failed[names[0]], 2000)}" for names in reasons.values()]
    found += [
        f"{one.entrant}, seed {one.seed}: trained for {one.seconds:.1f} s, not {race.seconds:g} s"
        for group in scores.values()
        for one in group
        if one.seconds > OVERTIME * race.seconds
    ]
    found += dict.fromkeys(f"{one.entrant}: {one.caution}" for group in scores.values() for one in group if one.caution)
    for one in race.entrants:
        if course.hopeless(one):
            found.append(f"{one.name}: with every learning rate that it tried, the loss stopped being finite")
        elif left := race.seeds - len(scores[one.name]):
            found.append(f"{one.name}: {left} of {race.seeds} runners to go")
    return found


def _points(course: Course) -> list[dict[str, Any]]:
    """One row per evaluation."""
    rows = []
    for score in (one for group in course.scores.values() for one in group):
        for point in score.points:
            selected = point == score.best
            rows.append(
                _common(course, score)
                | {"step": point.step, "forwards": point.forwards, "seconds": point.seconds}
                | {
                    "metric": score.metric,
                    "dev_metric": score.dev_metric,
                    "dev": point.dev,
                    "dev_loss": point.loss,
                    "selected": selected,
                }
                | {"test": score.test if selected else math.nan, "dev_n": score.n[0], "test_n": score.n[1]}
                | dict(score.about)
            )
    return rows


def _runners(course: Course) -> list[dict[str, Any]]:
    """One row per runner."""
    rows = []
    tried = {one.name: " ".join(_rate(lr, one.method) for lr in one.lrs) for one in course.race.entrants}
    for score in (one for group in course.scores.values() for one in group):
        best = score.best
        rows.append(
            _common(course, score)
            | {"lrs_tried": tried[score.entrant], "steps": score.steps, "forwards": score.forwards}
            | {"seconds": score.seconds, "evaluation_seconds": score.evaluating, "metric": score.metric}
            | {"dev_metric": score.dev_metric}
            | {"selected_step": best.step, "selected_seconds": best.seconds, "dev": best.dev, "dev_loss": best.loss}
            | {"test": score.test, "dev_n": score.n[0], "test_n": score.n[1]}
            | dict(score.about)
        )
    return rows


def _common(course: Course, score: Score) -> dict[str, Any]:
    race = course.race
    names = {"model": Path(race.model).name, "task": Path(race.task).name, "jobs": race.jobs}
    who = {"entrant": score.entrant, "method": score.method, "lr": _rate(score.lr, score.method), "seed": score.seed}
    return names | {"minutes": race.minutes} | who


def _rate(lr: float | None, method: str) -> str:
    return "" if method == ZERO_SHOT else AUTO if lr is None else show(lr)


def _counted(text: str, count: int, seeds: int) -> str:
    """Add the number of seeds to a mean over fewer than all.

    >>> _counted("70.1 ± 2.0", 2, 3), _counted("70.1 ± 2.0", 3, 3)
    ('70.1 ± 2.0 (2 of 3 seeds)', '70.1 ± 2.0')
    """
    return f"{text} ({count} of {seeds} seeds)" if 0 < count < seeds and text != MISSING else text


def _percent(mean: Mean) -> str:
    return _number(Mean(100 * mean.value, 100 * mean.spread, mean.count), 1)


def _number(mean: Mean, digits: int) -> str:
    if not mean.count or math.isnan(mean.value):
        return MISSING
    spread = "" if math.isnan(mean.spread) else f" ± {mean.spread:.{digits}f}"
    return f"{mean.value:.{digits}f}{spread}"
