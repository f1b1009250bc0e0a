"""``zeroblock race``: several methods on one model and task, at equal wall clock."""

from __future__ import annotations

import json as jsonlib
import shlex
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ZeroBlockError, ZeroBlockWarning, shown
from .sweep import MAX_REASON, Address, Cpus, Executor, Gpus, hiring, stoppable
from .train import settings

if TYPE_CHECKING:
    from ..race.course import Course
    from ..race.plan import Race
    from ..sweep.outcome import Outcome
    from ..sweep.plan import Run

SETTINGS = (
    "model", "random_weights", "trust_remote_code", "dtype", "device", "task", "data", "train", "dev", "test",
    "train_tokens", "batch_size", "lr_schedule", "eps", "eval_limit",
)  # fmt: skip


@settings(*SETTINGS)
def race(
    methods: Annotated[
        str, typer.Option(help="The methods, with commas between; ft is backpropagation with Adam.", metavar="A,B,…")
    ] = "mezo,mezo_bcd,lozo,ft",
    lr: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[METHOD=]X,Y,…",
            help="Learning rates to try, for all methods or for one; may be repeated. ft has its own around 3e-5.",
        ),
    ] = None,
    max_minutes: Annotated[float, typer.Option(help="Minutes of training per runner; evaluations come on top.")] = 10.0,
    seeds: Annotated[int, typer.Option(min=1, help="Runners per method, each with its own data and noise.")] = 3,
    try_share: Annotated[
        float, typer.Option(help="The fraction of the minutes for which a learning rate is tried.")
    ] = 0.25,
    evals: Annotated[int, typer.Option(min=1, help="Evaluations per runner.")] = 8,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the race; by default runs/race-TASK-MODEL.", metavar="DIR")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="[METHOD.]FIELD=VALUE",
            help="Another setting of zeroblock train, for all methods or for one, such as lozo.rank=4.",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runners at a time; they then share the machine.")] = 1,
    executor: Executor = "local",
    address: Address = None,
    cpus: Cpus = 1.0,
    gpus: Gpus = None,
    json: Annotated[bool, typer.Option("--json", help="Print the standings as JSON, one object per line.")] = False,
    **given: Any,
) -> None:
    """Race several methods on one model and task, at equal wall clock.

    For example: `zeroblock race --model smollm2 --task reviews --methods mezo_bcd,lozo,ft --lr 1e-4,3e-4,1e-3
    --max-minutes 2 --seeds 1`

    A short lap finds the pace of every method, then dev chooses its learning rate among as many as the
    others may try, then its runners train for the same time. The folder gets race.md, race.svg, race.csv
    and report.html. Stop the race at any time; the same command continues it, and one with more
    methods or seeds adds them.
    """
    flags = {name: value for name, value in given.items() if value is not None}
    planned = _plan(flags, methods, lr or [], overrides or [], max_minutes, seeds, try_share, evals)
    folder = out or Path("runs") / f"race-{Path(flags['task']).stem}-{Path(flags['model']).name}"
    if jobs > 1:
        warnings.warn(
            f"--jobs {jobs}: runners that share a device slow each other down, so seconds are those of a busy machine; "
            "forward passes stay comparable",
            ZeroBlockWarning,
            stacklevel=2,
        )
    if not json:
        typer.echo(_preview(planned))
    folder.mkdir(parents=True, exist_ok=True)
    with hiring(folder, jobs, executor, address, cpus, gpus) as (at_a_time, hire):
        from ..race.course import Course

        course = Course(planned, folder, at_a_time, hire, lambda line: _say(line, json), lambda *news: tell(*news))
        command = _command(sys.argv)

        def tell(event: str, run: Run, outcome: Outcome | None, error: str) -> None:
            if event == "end":
                _write(course, command)
            _say(_news(event, run, outcome, error), json)

        with stoppable(lambda: f"what is done is in {folder}"):
            course.make()
    _finish(course, command, json)


def _plan(
    flags: dict[str, Any],
    methods: str,
    lr: list[str],
    overrides: list[str],
    minutes: float,
    seeds: int,
    share: float,
    evals: int,
) -> Race:
    """Check everything that was asked for, before anything runs."""
    from ..race.plan import Race, enter
    from ..sweep.grid import parse

    for name in ("model", "task"):
        if name not in flags:
            raise ZeroBlockError(f"{name} is missing: give --{name}")
    common: dict[str, Any] = {"trust_remote_code": True} if flags.pop("trust_remote_code", False) else {}
    own: dict[str, dict[str, Any]] = {}
    for name, value in parse(overrides).items():
        method, dot, field = name.partition(".")
        if dot:
            own.setdefault(method, {})[field] = value
        else:
            common[name] = value
    names = [name.strip() for name in methods.split(",") if name.strip()]
    return Race(flags, enter(names, lr, own), seeds, minutes, share, evals, common)


def _preview(race: Race) -> str:
    """Say what is going to happen, and how long it takes."""
    tried = max(len(one.lrs) for one in race.entrants)
    each = race.lap_seconds + race.seconds * ((tried * race.share if tried > 1 else 0.0) + race.seeds)
    minutes = each * len(race.entrants) / 60
    names = ", ".join(one.method for one in race.entrants)
    return (
        f"{names}: {race.minutes:g} min of training per runner, {race.seeds} seed{'s' if race.seeds > 1 else ''}, "
        f"{tried} learning rate{'s' if tried > 1 else ''} each; about {minutes:.0f} min of training in all, "
        "evaluations come on top"
    )


def _news(event: str, run: Run, outcome: Outcome | None, error: str) -> str:
    if event == "begin":
        return f"begin  {run.name}"
    if outcome is None:
        return f"fail   {run.name}: {shown(error, MAX_REASON)}"
    return f"end    {run.name}: dev {outcome.dev:.1%}, loss {outcome.dev_loss:.4f}, {outcome.steps} steps"


def _say(line: str, json: bool) -> None:
    typer.echo(line, err=json or line.startswith("fail"))


def _write(course: Course, command: str) -> None:
    from ..race import table

    table.write(course, command)


def _finish(course: Course, command: str, json: bool) -> None:
    """Write everything and print the standings; the exit status is 1 if a method or a runner failed."""
    import dataclasses
    import importlib.util

    from ..evaluate.measurement import plain
    from ..race import figure, page, table

    scores = course.scores()
    if importlib.util.find_spec("matplotlib") is not None:
        figure.draw(course.folder, table.title(course), scores)
    else:
        _say("no figure: it needs pip install 'zeroblock[figures]'", True)
    _write(course, command)
    page.write_page(course, command)
    if json:
        for one in table.standings(scores):
            typer.echo(jsonlib.dumps(plain(dataclasses.asdict(one))))
    else:
        _print(course, scores)
    if course.out or course.failed:
        raise typer.Exit(1)


def _print(course: Course, scores: Any) -> None:
    from ..race import table

    rows = [table.SHORT, *(table.cells(one)[: len(table.SHORT)] for one in table.standings(scores))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    typer.echo(f"\n{table.title(course)}")
    for row in rows:
        words = [word.rjust(width) for word, width in zip(row, widths, strict=True)]
        typer.echo("  ".join([row[0].ljust(widths[0]), *words[1:]]))
    for note in table.uneven(scores, course.race.seconds):
        typer.echo(note[2:])
    typer.echo(f"race.md, race.svg, race.csv, runners.csv and report.html are in {course.folder}")


def _command(words: list[str]) -> str:
    """The command as it was typed."""
    return shlex.join(["zeroblock", *words[1:]])
