"""``zeroblock train``: one run, from flags, or from a file and flags that override it."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json as jsonlib
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ZeroBlockError, shown
from ..train.config import KINDS, Config, distrust, read, renamed
from ..train.launch import COMMAND, Launch
from ..train.value import choices

if TYPE_CHECKING:
    from ..train import Result

PANELS = {
    "model": "Model",
    "task": "Data",
    "method": "Training",
    "partition": "Parts of the method (each method has its own defaults)",
    "eval_every": "Evaluation",
    "engine": "Execution",
}
"""Panels of the help, by the first setting in each."""
MAX_METAVAR = 22
"""Longer lists of choices would leave the help text no space."""

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON, one object per line.")]
Out = Annotated[Path | None, typer.Option(help="The run's folder; by default a new one under runs/.", metavar="DIR")]


def settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the settings of a run to a command as options, which it receives in ``**given``: None if not given.

    Args:
        names: the names of the settings; all of them by default.
    """

    def add_options(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters = [*own, *_parameters(names or tuple(KINDS), {p.name for p in own})]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return add_options


def _parameters(names: Collection[str], taken: Collection[str]) -> list[inspect.Parameter]:
    parameters, panel = [], ""
    for item in dataclasses.fields(Config):
        panel = PANELS.get(item.name, panel)
        if item.name not in names or item.name in taken:
            continue
        kinds = [k for k in (KINDS[item.name], *typing.get_args(KINDS[item.name])) if k in (int, float, bool)]
        kind = kinds[0] if kinds else str
        flag = f"--{item.name.replace('_', '-')}"
        listed = "|".join(choices(KINDS[item.name]))
        option = typer.Option(
            f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
            help=f"{item.metadata['help']}{_default(item.default)}",
            metavar=listed if 0 < len(listed) <= MAX_METAVAR else None,
            show_default=False,
            rich_help_panel=panel,
        )
        parameters.append(_parameter(item.name, kind, option))
        if item.name == "schedule":  # the name it had until 0.1
            parameters.append(_parameter("order", str, typer.Option("--order", hidden=True)))
    return parameters


def _default(value: Any) -> str:
    """A default as the help shows it; flags that are off and settings without a default show none."""
    if value is None or value is False or value is dataclasses.MISSING:
        return ""
    return " [on]" if value is True else f" [{value}]"


def _parameter(name: str, kind: type, option: Any) -> inspect.Parameter:
    annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


@settings()
def train(
    config: Annotated[
        Path | None, typer.Option(help="TOML file of settings, named as the flags; flags override it.", metavar="FILE")
    ] = None,
    out: Out = None,
    quiet: Quiet = False,
    json: Json = False,
    **given: Any,
) -> None:
    """Fine-tune a model on a task, with forward passes only.

    For example: `zeroblock train --model smollm2 --task reviews --steps 2000`, or
    `--task mine.jsonl` for your own data

    Without `--lr` the steps are in units of the weights, and small enough for any model; with `--lr`, the
    learning rate and eps mean what they mean in the papers.

    The run's folder gets the configuration, a journal of every step, the evaluations, report.html,
    and at the end a summary with figures. Ctrl-C stops the run after the current step;
    `zeroblock resume DIR` continues it, bit for bit. `zeroblock tasks --help` says what your own
    data may look like, and `zeroblock plan` how long a run will take.

    On several GPUs or machines: `torchrun --nproc-per-node 8 -m zeroblock train …`, where the ranks
    share the examples or the probes of every step (`--parallel`).
    """
    from ..train import make, run

    flags = renamed({name: value for name, value in given.items() if value is not None})
    trusted = bool(flags.get("trust_remote_code"))
    written = renamed(distrust(read(config), config, trusted)) if config else {}
    try:
        settings = Config.of({**written, **flags})
    except ZeroBlockError as error:
        if config is None:
            raise
        raise ZeroBlockError(f"{config}{' with the flags given' if flags else ''}: {error}") from error
    launch = launched(flags)
    with joined(launch, settings.device, settings.timeout):
        result = (make if launch else run)(settings, out or default_out(settings), view(quiet, json, launch))
    report(result, json, launch)


def launched(flags: Mapping[str, Any]) -> Launch | None:
    """How torchrun started this process; None if it did not, in which case options for several ranks are refused.

    Args:
        flags: given on the command line.
    """
    launch = Launch.of()
    for name in ("parallel", "shard"):
        if launch is None and flags.get(name, "none") != "none":
            raise ZeroBlockError(f"--{name} is for several ranks: start them with {COMMAND}")
    return launch


def joined(launch: Launch | None, device: str, timeout: float) -> contextlib.AbstractContextManager[None]:
    """Join the other ranks, if there are any; see :meth:`Launch.joined`."""
    return contextlib.nullcontext() if launch is None else launch.joined(device, timeout)


def default_out(config: Config) -> Path:
    """Name a folder after the run in it."""
    rate = "" if config.lr is None else f"-lr{config.lr:g}"
    adapter = "-lora" if config.lora else "-prefix" if config.prefix else ""
    return Path("runs") / f"{Path(config.task).stem}-{config.method}{adapter}{rate}-seed{config.seed}"


def view(quiet: bool, json: bool, launch: Launch | None = None) -> Any:
    """Choose the view that suits the output: a terminal, a pipe, or nothing; of several ranks, rank 0 shows the run."""
    from ..report import view as views

    return views.view(quiet or (launch is not None and launch.rank > 0), json)


def report(result: Result, json: bool, launch: Launch | None = None) -> None:
    """Print how a run ended, unless another rank does, and exit with the status to match."""
    if launch is not None and launch.rank > 0:
        raise SystemExit(result.code)
    from ..report.summary import before, setback, weights_line, weights_title
    from ..task.metric import worded
    from ..train.folder import Folder

    summary = result.summary
    if summary is None:
        resumable = Folder(result.folder).journal.exists()
        advice = (
            f"continue with: zeroblock resume {result.folder}"
            if resumable
            else "without a journal it cannot be resumed"
        )
        typer.echo(f"stopped after step {result.steps}: {result.reason}; {advice}", err=True)
        raise SystemExit(result.code)
    if json:
        for line in json_lines(result):
            typer.echo(jsonlib.dumps(line))
        return
    # the summary may come from an untrusted folder
    dev, test, metric = summary["dev"], summary["test"], shown(summary["metric"])
    name = shown(f"{Path(summary['task']).stem}, {summary['method']}")
    typer.echo(f"{name}: {result.steps} step{'' if result.steps == 1 else 's'}, {summary['seconds']:.0f} s")
    if result.steps:
        selected_by = shown(summary["selected_by"])
        chosen = f"at step {summary['selected_step']}, selected by {selected_by} (n {dev['n']}){_exact(dev)}"
        typer.echo(f"  dev  {worded(metric, dev['value'])} {chosen}{before(summary, 'dev')}")
        was = before(summary, "test")
        typer.echo(f"  test {worded(metric, test['selected'])} at that step (n {test['n']}){_exact(test)}{was}")
        typer.echo(
            f"  test {worded(metric, test['best'])} best of the evaluations, as the paper reports: "
            f"step {test['best_step']}, chosen by looking at test"
        )
    else:
        typer.echo(f"  dev  {worded(metric, dev['value'])} (n {dev['n']}){_exact(dev)}")
        typer.echo(f"  test {worded(metric, test['selected'])} (n {test['n']}){_exact(test)}")
    if result.steps and (warning := setback(summary)):
        typer.secho(f"  {warning}", fg="red", bold=True)
    typer.echo(f"  {result.folder / 'summary.md'}")
    if weights := weights_line(result.folder, summary):
        typer.echo(f"the {weights_title(summary)}:\n  {weights}")


def _exact(numbers: dict[str, Any]) -> str:
    """Exact match, to follow the metric of a generated answer."""
    return f", exact match {numbers['exact_match']:.1%}" if numbers.get("exact_match") is not None else ""


def json_lines(result: Result) -> list[dict[str, Any]]:
    """The dev-selected results on dev and test; ``best`` is the best test value of all evaluations."""
    summary = result.summary or {}
    common = {"steps": result.steps, "seconds": summary["seconds"], "out": str(result.folder)}
    dev, test = summary["dev"], summary["test"]
    name = {"task": summary["task"], "metric": summary["metric"]}
    return [
        {**name, "value": dev["value"], "n": dev["n"], "split": "dev", **common},
        {**name, "value": test["selected"], "n": test["n"], "split": "test", "best": test["best"], **common},
    ]
