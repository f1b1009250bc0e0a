"""``zeroblock sweep``: many runs and one table, from one file."""

from __future__ import annotations

import contextlib
import json as jsonlib
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ZeroBlockError, shown, unknown
from ..lock import only_writer

if TYPE_CHECKING:
    from ..sweep.hands import Hire
    from ..sweep.outcome import Outcome, Outcomes
    from ..sweep.plan import Run, Sweep

EXECUTORS = ("local", "ray")
MAX_REASON, MAX_LINE = 2000, 1_000_000
"""Maximum printed characters of the reason why a run failed, and of a line of the table."""


Jobs = Annotated[
    int | None, typer.Option(min=1, help="Number of runs at a time. [1; with ray as many as fit]", show_default=False)
]
Executor = Annotated[
    str, typer.Option(metavar="local|ray", help="Make the runs in processes of this machine, or as tasks of Ray.")
]
Address = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="ray: the cluster to join, such as auto; by default this machine alone."),
]
Cpus = Annotated[float, typer.Option(min=0.0, help="ray: cores per run.")]
Gpus = Annotated[
    float | None,
    typer.Option(min=0.0, help="ray: GPUs per run, such as 0.5. [1 if there are any]", show_default=False),
]


def sweep(
    file: Annotated[Path, typer.Argument(help="The sweep file, in TOML; sweeps/ has the files of the paper's tables.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for runs and tables; by default runs/NAME, after the file.", metavar="DIR"),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Folder with local copies of the tasks.", metavar="DIR")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the file; may be repeated."),
    ] = None,
    jobs: Jobs = None,
    executor: Executor = "local",
    address: Address = None,
    cpus: Cpus = 1.0,
    gpus: Gpus = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs that are still to make, and make none.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")] = False,
) -> None:
    """Make every run of a sweep file and write their table.

    Finished runs are not made again, and unfinished ones are resumed: stop the sweep at any time
    and give the same command to continue. The table is updated after every run.
    """
    from ..sweep import table
    from ..sweep.grid import parse
    from ..sweep.outcome import read
    from ..sweep.plan import Sweep

    overrides = parse(settings or []) | ({} if data is None else {"data": data})
    plan = Sweep.load(file, overrides)
    folder = Path("runs") / plan.name if out is None else out
    if dry_run:
        _list(plan, folder, json)
        return
    command = _command(file, out, data, settings)
    with only_writer(folder):
        outcomes = read(plan, folder / "runs")
        table.write(plan, folder, outcomes, {}, command)
        if not json:
            typer.echo(_state(plan, outcomes))
        with hiring(folder, jobs, executor, address, cpus, gpus) as (at_a_time, hire):
            failed = _make(plan, folder, at_a_time, hire, command, json)
    if not json:
        written = (folder / "table.md").read_text(encoding="utf-8")
        typer.echo("\n".join(shown(line, MAX_LINE) for line in written.split("\n")))
        typer.echo(f"tables and runs are in {folder}")
    if failed:
        raise typer.Exit(1)


@contextlib.contextmanager
def hiring(
    folder: Path, jobs: int | None, executor: str, address: str | None, cpus: float, gpus: float | None
) -> Iterator[tuple[int, Hire]]:
    """Yield the number of runs at a time and the function that hires hands for them: local ones, or on Ray.

    Args:
        folder: the sweep's folder.
        jobs: the number of runs at a time; None for one, or with Ray as many as fit.
        executor: local or ray.
        address: the address of a Ray cluster.
        cpus: cores per run on Ray.
        gpus: GPUs per run on Ray.
    """
    from ..sweep.hands import local

    if executor not in EXECUTORS:
        raise unknown("executor", executor, EXECUTORS)
    if executor == "local":
        if address is not None or gpus is not None or cpus != 1.0:
            raise ZeroBlockError("--address, --cpus and --gpus are for Ray: add --executor ray")
        yield jobs or 1, local(jobs or 1)
        return
    from ..sweep.cluster import Cluster

    with Cluster(folder, address, cpus, gpus) as cluster:
        yield jobs or cluster.slots, cluster.hire


def _make(sweep: Sweep, folder: Path, jobs: int, hire: Hire, command: str, json: bool) -> dict[str, str]:
    """Make the runs and keep the tables up to date; return the reasons of failed runs, by name."""
    from ..sweep import table
    from ..sweep.crew import Crew

    def tell(event: str, run: Run, outcome: Outcome | None, error: str) -> None:
        done = len(crew.outcomes)
        if event != "begin":
            table.write(sweep, folder, crew.outcomes, crew.failed, command)
        if json:
            if event != "begin":
                typer.echo(jsonlib.dumps(_object(run, outcome, error)))
        elif event == "begin":
            typer.echo(f"begin  {run.name}")
        elif outcome is None:
            typer.echo(f"fail   {run.name}: {shown(error, MAX_REASON)}", err=True)
        else:
            typer.echo(
                f"end    {run.name}: dev {outcome.dev:.1%}, test {outcome.test:.1%}, {outcome.seconds:.0f} s, "
                f"{done} finished"
            )

    crew = Crew(sweep, folder, jobs, tell, hire)
    with stoppable(lambda: f"{len(crew.outcomes)} runs are finished"):
        crew.make()
    if json:
        left = {"out": str(folder), "finished": len(crew.outcomes), "failed": len(crew.failed)}
        typer.echo(jsonlib.dumps(left | {"table": str(folder / "table.md")}))
    return crew.failed


@contextlib.contextmanager
def stoppable(state: Callable[[], str]) -> Iterator[None]:
    """Let Ctrl-C, `timeout` and batch systems stop the work inside cleanly, with the exit status to match.

    A second signal stops it at once.

    Args:
        state: returns the progress as text.
    """
    code: int = 128 + signal.SIGINT

    def terminate(number: int, frame: object) -> None:
        nonlocal code
        code = 128 + number
        raise KeyboardInterrupt

    before = {one: signal.signal(one, terminate) for one in (signal.SIGINT, signal.SIGTERM)}  # SIGINT may be ignored
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"stopped; {state()}, the same command continues", err=True)
        raise SystemExit(code) from None
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _list(sweep: Sweep, folder: Path, json: bool) -> None:
    from ..sweep.outcome import due, read

    outcomes = read(sweep, folder / "runs")
    left = due(sweep, outcomes)
    if json:
        for run in sweep.runs.values():
            state = "finished" if run.name in outcomes else "due" if run in left else "waiting"
            typer.echo(jsonlib.dumps({"run": run.name, "state": state, **run.varied}))
        return
    for run in left:
        typer.echo(run.name)
    typer.echo(_state(sweep, outcomes))


def _state(sweep: Sweep, outcomes: Outcomes) -> str:
    from ..sweep.outcome import due, waiting

    others = waiting(sweep, outcomes)
    later = f", and {others} of the other seeds once dev has chosen" if others else ""
    done, left = len(outcomes), len(due(sweep, outcomes))
    sizes = f"rows: {len(sweep.rows)}, tasks: {len(sweep.tasks)}"
    return f"{sizes}; {done} runs finished, {left} due{later}"


def _object(run: Run, outcome: Outcome | None, error: str) -> dict[str, Any]:
    from dataclasses import asdict

    from ..sweep.table import settings

    line = {"run": run.name, "task": run.config.task, "method": run.config.method, **settings(run)}
    return line | ({"error": error} if outcome is None else asdict(outcome))


def _command(file: Path, out: Path | None, data: str | None, settings: list[str] | None) -> str:
    words = ["zeroblock", "sweep", str(file)]
    words += ["--out", str(out)] if out is not None else []
    words += ["--data", data] if data is not None else []
    words += [word for setting in settings or [] for word in ("--set", setting)]
    return shlex.join(words)
