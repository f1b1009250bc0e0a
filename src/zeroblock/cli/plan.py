"""``zeroblock plan``: how much memory and time a run will take, before it starts."""

from __future__ import annotations

import json as jsonlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import shown
from .train import settings

if TYPE_CHECKING:
    from ..forecast import Forecast

ABOUT = {
    "mezo_bcd": "weights, copies of one tensor",
    "mezo": "as mezo_bcd",
    "sparse_mezo": "as mezo, and a mask",
    "lozo": "weights, low-rank factors",
    "mezo_bcd_adam": "as mezo_bcd, and two moments of a block",
    "mezo_adam": "as mezo, and two moments of all weights",
    "ft": "weights, gradients, Adam's moments, activations",
}
CHOSEN = {
    "mezo_bcd_adaptive": "as mezo_bcd",
    "lozo_m": "as lozo, and a momentum of low rank",
    "zo_sign": "as mezo",
    "zo_momentum": "as mezo, and a momentum of all weights",
    "lezo": "as mezo_bcd",
    "adalezo": "as mezo_bcd",
    "hizoo": "as mezo, and the curvature of all weights",
    "conmezo": "as mezo, and a momentum of all weights",
    "subzero": "as mezo, and two frames per matrix",
    "zo_muon": "as mezo, and a frame per matrix",
    "eggroll": "weights, low-rank factors per probe",
    "fzoo": "as mezo, and activations of nine rows",
    "fzoo_bcd": "as mezo_bcd, and activations of nine rows",
    "mezo_greedy": "as mezo, and activations of eight rows",
    "adamezo": "as mezo, and ten numbers per tensor",
    "mezo_svrg": "as mezo, and a copy of the active block",
}
"""Methods that are shown only if the run uses them, so that the plan fits on one screen."""


@settings()
def plan(
    seconds: Annotated[float, typer.Option(min=0.0, help="Time to spend on measured steps.")] = 10.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    **given: Any,
) -> None:
    """Say how much memory and time a run will take on this machine, from a few real steps on your data.

    For example: `zeroblock plan --model smollm2 --data mine.csv`

    It takes the settings of `zeroblock train`. Give your own file with `--task`, as for
    `zeroblock train`, or with `--data`. A model that does not fit into memory is not loaded; then its
    memory is computed, not measured.
    """
    from ..forecast import LR, forecast
    from ..train.config import Config, renamed

    values = renamed({name: value for name, value in given.items() if value is not None})
    if "task" not in values and "data" in values:
        values["task"] = values.pop("data")
    lr = values.get("lr")
    found = forecast(Config.of({**values, "lr": lr or LR}), seconds, lambda text: typer.echo(text, err=True))
    if json:
        typer.echo(jsonlib.dumps(found.document(), indent=2))
        return
    _print(found, values)


def _print(found: Forecast, values: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..report.html import size, span

    console = Console(highlight=False)
    config, timing = found.config, found.timing
    name = shown(f"{Path(config.model).name} · {Path(config.task).stem} · {config.method}")
    console.print()
    console.print(f" {name}", style="bold", markup=False)
    sheet = Table.grid(padding=(0, 2))
    sheet.add_column(style="dim", no_wrap=True)
    sheet.add_column()
    free = "" if found.free_bytes is None else f", {size(found.free_bytes)} free"
    sheet.add_row(" machine", f"{found.machine}{free}")
    batch = config.batch_size * config.accumulate
    rows = ", ".join(f"{count:,} {split}" for split, count in found.rows.items())
    sheet.add_row(" data", f"{rows}; {found.load.tokens:,} tokens per step of {batch} rows")
    epochs = f" = {found.epochs:,.1f} epochs" if found.epochs is not None else ""
    sheet.add_row(" run", f"{config.steps:,} steps{epochs}, {found.evaluations} evaluations")
    if timing is not None and found.steps_s is not None and found.evaluations_s is not None:
        total = found.steps_s + found.evaluations_s
        measured = f"{_short(timing.step_s)} ± {_short(timing.error_s)} per step, measured over {timing.steps} steps"
        sheet.add_row(" time", f"[bold]{span(total)}[/bold] on this machine: {measured}")
        parts = f"{span(found.steps_s)} of steps, {span(found.evaluations_s)} of evaluations"
        captures = f", {span(timing.capture_s)} of captures among the steps" if timing.capture_s else ""
        sheet.add_row("", f"[dim]{parts}{captures}[/dim]")
    else:
        sheet.add_row(" time", f"[yellow]not measured:[/yellow] {found.reason}")
    how = "measured" if timing is not None and timing.peak_bytes else "expected"
    how += ", besides Python and its libraries" if config.device == "cpu" else ""
    fits = {True: "[green]it fits[/green]", False: "[red]it does not fit here[/red]", None: ""}[found.fits]
    if found.fits is False and config.offload is None and config.method != "ft":
        fits += f"; --offload {'disk' if config.device == 'cpu' else 'host'} streams the weights"
    weights = f"{found.weights / 1e6:,.4g} M weights in {config.weights or config.dtype}"
    sheet.add_row(" memory", f"[bold]{size(found.peak_bytes)}[/bold] at its peak ({how}), {weights}: {fits}")
    if found.approximate:
        about = "about: the checkpoint's integers were not read, but counted as --weights would store them"
        sheet.add_row("", f"[dim]{about}[/dim]")
    if config.offload is not None:
        where = {"host": "on the host, copied layer by layer", "disk": "in a private file of the run, layer by layer"}
        sheet.add_row(" weights", where[config.offload])
    if found.division is not None:
        sheet.add_row("", found.division.describe())
    console.print(sheet)
    console.print()
    console.print(_methods(found))
    console.print()
    words = ["zeroblock", "train"]
    for key, value in values.items():
        flag = f"--{key.replace('_', '-')}"
        words += [flag] if value is True else [f"--no-{flag[2:]}"] if value is False else [flag, str(value)]
    line = shown(shlex.join(words), 2000) + ("" if "lr" in values or config.method != "ft" else " --lr LR")
    console.print(f" Start it with: {line}", markup=False, soft_wrap=True)


def _methods(found: Forecast) -> Any:
    from rich.table import Table

    from ..report.html import size

    stored = f" with matrices in {found.config.weights.partition(':')[0]}" if found.config.weights else ""
    title = f" expected peak memory{stored}"
    sheet = Table(title=title, title_justify="left", title_style="dim", box=None, padding=(0, 2))
    for name, width in (("  method", 15), ("CPU, fp32", 9), ("GPU, 16 bit", 11), ("it holds", 0)):
        sheet.add_column(name, justify="right" if "," in name else "left", no_wrap=True, min_width=width or None)
    for one in found.memory:
        mark = "▸ " if one.method == found.config.method else "  "
        if not mark.strip() and one.method not in ABOUT:
            continue
        about = f"[dim]{(ABOUT | CHOSEN).get(one.method, '')}[/dim]"
        sheet.add_row(mark + one.method, size(one.cpu), size(one.gpu), about, style="bold" if mark.strip() else "")
    return sheet


def _short(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
