"""``zeroblock race``: several methods on one model, on one task or several, at equal wall clock."""

from __future__ import annotations

import contextlib
import importlib.util
import json as jsonlib
import math
import shlex
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ZeroBlockError, ZeroBlockWarning, shown, unknown
from ..lock import only_writer
from .sweep import MAX_REASON, Address, Cpus, Executor, Gpus, hiring, stoppable
from .train import settings

if TYPE_CHECKING:
    from ..race.course import Course
    from ..race.plan import Race
    from ..race.score import Score
    from ..sweep.plan import Run

SETTINGS = (
    "model", "random_weights", "trust_remote_code", "dtype", "device", "data", "train", "dev", "test",
    "train_tokens", "batch_size", "lr_schedule", "eps", "eval_limit",
)  # fmt: skip


@settings(*SETTINGS)
def race(
    task: Annotated[
        str | None, typer.Option(help="A task of zeroblock train, or several separated by commas.", metavar="A,B,…")
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="The methods, separated by commas; NAME=METHOD is a variant that --set NAME.FIELD changes, ft is "
            "backpropagation with Adam, zero-shot the model as it is.",
            metavar="A,B,…",
        ),
    ] = "mezo,mezo_bcd,lozo,ft",
    lr: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[METHOD=]X,Y,…",
            help="Learning rates to try, for all methods or for one; auto adds the method without one. May be "
            "repeated. ft has its own around 3e-5. [auto]",
            show_default=False,
        ),
    ] = None,
    max_minutes: Annotated[float, typer.Option(help="Minutes of training per runner; evaluations come on top.")] = 10.0,
    seeds: Annotated[int, typer.Option(min=1, help="Runners per method, each with its own data and noise.")] = 3,
    try_share: Annotated[
        float, typer.Option(help="The fraction of the minutes for which a learning rate is tried.")
    ] = 0.25,
    evals: Annotated[int, typer.Option(min=1, help="Evaluations on dev per runner.")] = 8,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the race, or with several tasks of TASK/ for each. [runs/race-TASK-MODEL]",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="[METHOD.]FIELD=VALUE",
            help="Another setting of zeroblock train, for all methods or for one, such as lozo.rank=4.",
        ),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(min=1, help="Number of concurrent runners, the same throughout the race; they share the machine."),
    ] = 1,
    total_minutes: Annotated[
        float | None, typer.Option(help="Start no runner that would not finish within this many minutes.")
    ] = None,
    executor: Executor = "local",
    address: Address = None,
    cpus: Cpus = 1.0,
    gpus: Gpus = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the planned runs and the expected time.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the standings as JSON, one object per line.")] = False,
    **given: Any,
) -> None:
    """Race several methods on one model, on one task or several, at equal wall clock.

    For example: `zeroblock race --model smollm2 --task reviews --methods mezo_bcd,lozo,ft --lr auto,1e-4,3e-4
    --max-minutes 2 --seeds 1`

    Dev chooses the learning rate of every method, and all methods try the same number of them;
    then the runners of every method train for the same time. Without --lr every method but ft finds
    its own step size. Test is measured once per runner. The folder gets race.md, race.svg, race.csv and
    report.html. Stop the race at any time; the same command continues it, and one with more
    methods or seeds adds them.
    """
    flags = {name: value for name, value in given.items() if value is not None}
    tasks = [name.strip() for name in (task or "").split(",") if name.strip()]
    _check_tasks(tasks)
    planned = [
        _plan({**flags, "task": name}, methods, lr or [], overrides or [], max_minutes, seeds, try_share, evals, jobs)
        for name in tasks
    ]
    if not planned:
        raise ZeroBlockError("task is missing: give --task")
    stems = [Path(name).stem for name in tasks]
    if twice := next((stem for stem in stems if stems.count(stem) > 1), None):
        raise ZeroBlockError(f"--task names {twice} twice, but a task's folder has its name: race them separately")
    folder = out or Path("runs") / f"race-{'-'.join(stems)}-{Path(flags['model']).name}"
    from ..race.course import Course
    from ..race.stable import Stable, duration

    command = shlex.join(["zeroblock", *sys.argv[1:]])
    places = [folder / Path(one.task).stem if len(planned) > 1 else folder for one in planned]
    courses = [Course(one, place, command) for one, place in zip(planned, places, strict=True)]
    if dry_run or not json:
        typer.echo(_preview(courses), err=json)
    if dry_run:
        return
    if jobs > 1:
        warnings.warn(
            f"--jobs {jobs}: runners that share a device slow each other down, so seconds are those of a busy machine; "
            "forward passes stay comparable",
            ZeroBlockWarning,
            stacklevel=2,
        )
    until = math.inf
    if total_minutes is not None:
        until = time.monotonic() + 60 * total_minutes - duration(planned[0].seconds)
    with contextlib.ExitStack() as stack:
        for place in places:
            stack.enter_context(only_writer(place))
        courses = [Course(one, place, command) for one, place in zip(planned, places, strict=True)]  # as they are now
        for course in courses:
            course.save()
        with hiring(folder, jobs, executor, address, cpus, gpus) as (at_a_time, hire):
            stable = Stable(courses, folder, at_a_time, hire, lambda *news: _tell(json, *news), until)
            with stoppable(lambda: f"what is done is in {folder}"):
                stable.make()
        for course in courses:
            _finish(course, json)
    if any(course.failed for course in courses):
        raise typer.Exit(1)


def _check_tasks(names: list[str]) -> None:
    """Refuse a misspelt task before any heat begins."""
    from ..task import TASKS
    from ..task.own import is_hub, is_path

    for name in names:
        if name not in TASKS and not is_path(name) and not is_hub(name):
            raise unknown("task", name, TASKS)


def _plan(
    flags: dict[str, Any],
    methods: str,
    lr: list[str],
    overrides: list[str],
    minutes: float,
    seeds: int,
    share: float,
    evals: int,
    jobs: int,
) -> Race:
    """Check all options before anything runs."""
    from ..race.plan import Race, enter
    from ..sweep.grid import parse

    if "model" not in flags:
        raise ZeroBlockError("model is missing: give --model")
    common: dict[str, Any] = {"trust_remote_code": True} if flags.pop("trust_remote_code", False) else {}
    own: dict[str, dict[str, Any]] = {}
    for name, value in parse(overrides).items():
        entrant, dot, field = name.partition(".")
        if dot:
            own.setdefault(entrant, {})[field] = value
        else:
            common[name] = value
    names = [name.strip() for name in methods.split(",") if name.strip()]
    return Race(flags, enter(names, lr, own), seeds, minutes, share, evals, common, jobs)


def _preview(courses: list[Course]) -> str:
    """Describe the race and its expected time; if the race is being continued, only the rest of it."""
    from ..race.stable import BETWEEN_S, START_S, expected_seconds

    first, lines, whole = courses[0].race, [], START_S
    names = ", ".join(one.name for one in first.entrants)
    lines.append(
        f"{names}: {first.seconds:g} s of training per runner, {first.seeds} seed{'s' if first.seeds > 1 else ''}, "
        f"{first.jobs} at a time"
    )
    for course in courses:
        count, seconds = expected_seconds(course)
        whole += seconds
        done = f", {len(course.done)} are done" if course.done else ""
        heats = f"{count} heat{'' if count == 1 else 's'}{' left' if course.done else ''}"
        lines.append(f"{Path(course.race.task).stem}: {heats}, about {seconds:.0f} s{done}")
    lines.append(
        f"about {whole:.0f} s in all, if {START_S:g} s pass before the first heat and a heat takes {BETWEEN_S:g} s "
        "in addition to its steps"
    )
    return "\n".join(lines)


def _tell(json: bool, event: str, course: Course, run: Run, score: Score | None, error: str) -> None:
    from ..race import table

    if event == "begin":
        line = f"begin  {run.name}"
    elif score is None:
        line = f"fail   {run.name}: {shown(error, MAX_REASON)}"
    else:
        table.write(course)
        line = f"end    {run.name}: dev {score.best.dev:.1%}, loss {score.best.loss:.4f}, {score.steps} steps"
    typer.echo(line, err=json or line.startswith("fail"))


def _finish(course: Course, json: bool) -> None:
    """Write everything and print the standings."""
    import dataclasses

    from ..evaluate.measurement import plain
    from ..race import table
    from ..race.page import write_report

    course.save()
    write_report(course.folder)
    if importlib.util.find_spec("matplotlib") is None:
        typer.echo("no figure: it needs pip install 'zeroblock[figures]', then zeroblock report draws it", err=True)
    if json:
        for one in table.standings(course.scores):
            typer.echo(jsonlib.dumps({"task": course.race.task} | plain(dataclasses.asdict(one))))
        return
    standings = [table.cells(one, course.race.seeds) for one in table.standings(course.scores)]
    rows = [table.SHORT, *(row[: len(table.SHORT)] for row in standings)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    typer.echo(f"\n{table.title(course)}")
    for row in rows:
        words = [word.rjust(width) for word, width in zip(row, widths, strict=True)]
        typer.echo("  ".join([row[0].ljust(widths[0]), *words[1:]]))
    for note in table.notes(course):
        typer.echo(note)
    typer.echo(f"race.md, race.svg, race.csv, runners.csv and report.html are in {course.folder}")
