"""``zeroblock train``: one run, from flags or from a file with flags on top."""

from __future__ import annotations

import dataclasses
import inspect
import json as jsonlib
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ZeroBlockError
from ..train.config import KINDS, Config, read

if TYPE_CHECKING:
    from ..train import Result

PANELS = {"model": "Model", "task": "Data", "method": "Method", "eval_every": "Evaluation", "engine": "Execution"}
"""Panels of the help, by the first setting in each."""

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print the results as one JSON object a line.")]


def settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the settings of a run as options; it takes them as ``**given``, None where not given.

    Args:
        names: which of them; all unless said.
    """

    def dress(command: Callable[..., None]) -> Callable[..., None]:
        written = inspect.signature(command, eval_str=True)
        own = [p for p in written.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters = [*own, *_parameters(names or tuple(KINDS), {p.name for p in own})]
        command.__signature__ = written.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return dress


def _parameters(names: Collection[str], taken: Collection[str]) -> list[inspect.Parameter]:
    found, panel = [], ""
    for item in dataclasses.fields(Config):
        panel = PANELS.get(item.name, panel)
        if item.name not in names or item.name in taken:
            continue
        kinds = [k for k in (KINDS[item.name], *typing.get_args(KINDS[item.name])) if k in (int, float, bool)]
        kind = kinds[0] if kinds else str
        flag = f"--{item.name.replace('_', '-')}"
        default = item.default if item.default not in (None, False, dataclasses.MISSING) else ""
        option = typer.Option(
            f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
            help=f"{item.metadata['help']}{f' [{default}]' if default != '' else ''}",
            show_default=False,
            rich_help_panel=panel,
        )
        annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
        found.append(inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return found


@settings()
def train(
    config: Annotated[Path | None, typer.Option(help="TOML of settings; flags win over it.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; one under runs/ unless said.")] = None,
    quiet: Quiet = False,
    json: Json = False,
    **given: Any,
) -> None:
    """Fine-tune a model on a task, with forward passes only.

    Writes its folder as it goes: configuration, journal, evaluations, summary, figures. Ctrl-C
    stops it after the step; `zeroblock resume` continues it bit for bit.
    """
    from ..train import run

    flags = {name: value for name, value in given.items() if value is not None}
    written = read(config) if config else {}
    try:
        settings = Config.of({**written, **flags})
    except ZeroBlockError as error:
        if config is None:
            raise
        raise ZeroBlockError(f"{config}{' with the flags given' if flags else ''}: {error}") from error
    report(run(settings, out or default_out(settings), view(quiet, json)), json)


def default_out(config: Config) -> Path:
    """A folder that says what is in it."""
    rate = "" if config.lr is None else f"-lr{config.lr:g}"
    return Path("runs") / f"{Path(config.task).stem}-{config.method}{rate}-seed{config.seed}"


def view(quiet: bool, json: bool) -> Any:
    """The view that fits where the output goes."""
    from ..report import view as views

    return views.view(quiet, json)


def report(result: Result, json: bool) -> None:
    """Print how a run ended, and leave with the status that says so."""
    from ..train.folder import Folder

    summary = result.summary
    if summary is None:
        how = "" if result.code == 0 else f": {result.reason}"
        begun = Folder(result.folder).journal.exists()
        onward = f"continue with: zeroblock resume {result.folder}" if begun else "without a journal it is not resumed"
        typer.echo(f"stopped after step {result.steps}{how}; {onward}", err=True)
        raise SystemExit(result.code)
    if json:
        for line in json_lines(result):
            typer.echo(jsonlib.dumps(line))
        return
    dev, test, metric = summary["dev"], summary["test"], summary["metric"]
    at = f"step {summary['selected_step']}"
    typer.echo(f"{Path(summary['task']).stem}, {summary['method']}: {result.steps} steps, {summary['seconds']:.0f} s")
    if result.steps:
        chosen = f"at {at}, selected by {summary['selected_by']} (n {dev['n']}){_exact(dev)}"
        typer.echo(f"  dev  {metric} {dev['value']:.1%} {chosen}")
        typer.echo(f"  test {metric} {test['selected']:.1%} at that step (n {test['n']}){_exact(test)}")
        typer.echo(
            f"  test {metric} {test['best']:.1%} best of the evaluations, as the paper reports; it looks at test "
            f"(step {test['best_step']})"
        )
    else:
        typer.echo(f"  dev  {metric} {dev['value']:.1%} (n {dev['n']}){_exact(dev)}")
        typer.echo(f"  test {metric} {test['selected']:.1%} (n {test['n']}){_exact(test)}")
    typer.echo(f"  {result.folder / 'summary.md'}")


def _exact(found: dict[str, Any]) -> str:
    """Exact match beside the metric of a generated answer."""
    return f", exact match {found['exact_match']:.1%}" if "exact_match" in found else ""


def json_lines(result: Result) -> list[dict[str, Any]]:
    """The results on dev and test, dev-selected; ``best`` is the best test value of all evaluations."""
    summary = result.summary or {}
    common = {"steps": result.steps, "seconds": summary["seconds"], "out": str(result.folder)}
    dev, test = summary["dev"], summary["test"]
    name = {"task": summary["task"], "metric": summary["metric"]}
    return [
        {**name, "value": dev["value"], "n": dev["n"], "split": "dev", **common},
        {**name, "value": test["selected"], "n": test["n"], "split": "test", "best": test["best"], **common},
    ]
