"""``zeroblock bench``: the cost of a step in time and memory, compared with the published procedures."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ZeroBlockError, unknown
from .bench_shared import (
    MAX_TOKENS,
    STAND_IN,
    BatchSize,
    Csv,
    Data,
    Device,
    Dtype,
    EncodedFile,
    Graphs,
    Json,
    Model,
    Sheet,
    Task,
    Tasks,
    Tokenizer,
    graphed,
    listed,
    say,
    stand,
)
from .flag import App

if TYPE_CHECKING:
    from ..bench.row import BenchRow
    from ..bench.run import RunRow

app = App(help="Measure the cost of a step; draw and tabulate measurements.", no_args_is_help=True)


@app.command()
def step(
    task: Tasks,
    model: Model,
    batch_size: BatchSize = 16,
    methods: Annotated[
        str, typer.Option(help="Names separated by commas; NAME-reference is the published procedure.")
    ] = ("mezo-reference,mezo,lozo,sparse_mezo,mezo_bcd"),
    engines: Annotated[
        str, typer.Option(help="sequential, forked, or both separated by a comma.")
    ] = "sequential,forked",
    data: Data = None,
    encoded: EncodedFile = None,
    tokenizer: Tokenizer = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    steps: Annotated[int, typer.Option(min=1, help="Minimum number; rounded up to whole cycles of layers.")] = 20,
    warmup: Annotated[
        int | None,
        typer.Option(min=0, help="Untimed warm-up steps; by default one cycle, or on a GPU the number of timed steps."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Take exactly --steps after a short warm-up: for a first look.")
    ] = False,
    interval: Annotated[
        int | None,
        typer.Option(min=1, help="Steps per turn for methods that hold a block: fewer make a cycle shorter."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum length of a packed row; longer batches are split.")
    ] = None,
    graphs: Graphs = "auto",
    json: Json = False,
    csv: Csv = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of the noise, of the order of blocks and of the data.")
    ] = 0,
) -> None:
    """Measure time and peak memory of a step by method and engine, and the ratio to MeZO's own procedure."""
    from ..bench import variant
    from ..bench.row import BenchRow
    from ..bench.step import Sampling, measure

    choices = variant.choose(listed(methods), listed(engines))
    sampling = Sampling(batch_size, steps, quick, warmup, seed, max_tokens, graphed(graphs), interval)
    sheet = Sheet(BenchRow, csv)
    on = stand(model, listed(task), data, encoded, tokenizer, device, dtype, seed=seed)
    for name, pool in on.pools.items():
        for row in measure(on.model, pool, choices, sampling, names=(model, name), idle_bytes=on.idle, tell=say):
            sheet.add(row)
    sheet.show(json, _print)


@app.command()
def run(
    task: Tasks,
    model: Model,
    method: Annotated[str, typer.Option(help="A method of the library.")] = "mezo_bcd",
    steps: Annotated[int, typer.Option(min=3, help="Length of the run.")] = 3000,
    batch_size: BatchSize = 16,
    data: Data = None,
    encoded: EncodedFile = None,
    tokenizer: Tokenizer = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Annotated[
        str | None, typer.Option(help="Store the layers' matrices as int8 or int4; then --no-reference is needed.")
    ] = None,
    graphs: Graphs = "auto",
    reference: Annotated[bool, typer.Option(help="Also time MeZO's own procedure.")] = True,
    json: Json = False,
    csv: Csv = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of noise, of the order of blocks and of the examples.")
    ] = 0,
) -> None:
    """Measure a real run: shuffled batches, packing, captures and journal included."""
    from ..bench import run as runs

    if weights is not None and reference:
        raise ZeroBlockError("MeZO's own procedure moves weights in place, which integers cannot: add --no-reference")
    choice = graphed(graphs)
    sheet = Sheet(runs.RunRow, csv)
    on = stand(model, listed(task), data, encoded, tokenizer, device, dtype, seed=seed, weights=weights)
    for name, pool in on.pools.items():
        beside = runs.reference_ms(on.model, pool, batch_size, seed) if reference else None
        row = runs.measure(
            on.model, pool, method, steps, batch_size=batch_size, seed=seed, graphs=choice,
            names=(model, name), reference=beside, idle_bytes=on.idle, tell=say,
        )  # fmt: skip
        sheet.add(row)
    sheet.show(json, _print_runs)


@app.command()
def cost(
    task: Task,
    model: Model,
    method: Annotated[str, typer.Option(help="A block-coordinate method.")] = "mezo_bcd",
    batch_size: BatchSize = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Steps per block; their median counts.")] = 5,
    device: Device = "auto",
    dtype: Dtype = "auto",
    graphs: Graphs = "auto",
    data: Data = None,
    encoded: EncodedFile = None,
    tokenizer: Tokenizer = None,
    hold: Annotated[bool, typer.Option("--hold", help="Also time steps that reuse the block's prefix.")] = False,
    json: Json = False,
    csv: Csv = None,
) -> None:
    """Measure a step on every block, next to the prediction that economical schedules make from a few blocks."""
    from ..bench import cost as costs

    choice = graphed(graphs)
    sheet = Sheet(costs.CostRow, csv)
    on = stand(model, [task], data, encoded, tokenizer, device, dtype)
    for row in costs.table(on.model, on.pools[task], (model, task), method, batch_size, rounds, choice, hold):
        sheet.add(row)
    sheet.show(json, lambda rows: typer.echo(costs.text(rows)))


@app.command()
def encode(
    task: Tasks,
    out: Annotated[Path, typer.Option(help="A .jsonl file, or a folder for TASK.jsonl.")],
    data: Data = None,
    tokenizer: Annotated[str, typer.Option(help="Model whose tokenizer to use.")] = STAND_IN,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of examples.")] = 1000,
    max_length: Annotated[int, typer.Option(min=2, help="Longer contexts are cut on the left.")] = MAX_TOKENS,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the data.")] = 0,
) -> None:
    """Write a task's examples as token ids, for a machine that has neither data nor tokenizer."""
    from .. import model as models
    from ..bench import batch
    from ..task import get

    names = listed(task)
    if out.suffix and len(names) > 1:
        raise ZeroBlockError(f"{len(names)} tasks do not fit into one file: give --out a folder")
    reader = models.tokenizer(tokenizer)
    for name in names:
        pool = batch.encode(get(name, reader), data, reader, seed=seed, limit=limit, max_length=max_length)
        path = out if out.suffix else out / f"{name}.jsonl"
        batch.write(path, pool)
        typer.echo(f"{path}: {len(pool.encoded)} examples of {name}, the longest {pool.longest} tokens")


@app.command()
def memory(
    model: Annotated[str, typer.Option(help="A folder, hub id, or a shape of OPT; no weights are needed.")],
    dtype: Annotated[str, typer.Option(help="Dtype of the weights: fp16, bf16 or fp32.")] = "fp16",
    rank: Annotated[int, typer.Option(min=1, help="Rank of LOZO's factors.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a forward, used with --length.")] = 32,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens per row; adds the memory of a forward.")] = None,
    measured: Annotated[
        Path | None, typer.Option(help="A CSV of bench step; its measured peaks are shown too.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table next to the papers' claims.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the theoretical table of every method's peak memory for any model, next to measured peaks."""
    from .. import model as models
    from ..bench import claim
    from ..bench import memory as theory
    from ..bench import row as rows_of

    if dtype not in models.DTYPES:
        raise unknown("dtype", dtype, models.DTYPES)
    kind = models.DTYPES[dtype]
    skeleton = models.skeleton(model)
    needs = theory.table(skeleton, kind.itemsize, rank)
    forward = theory.forward(skeleton.config, kind.itemsize, batch_size, length) if length else None
    rows = rows_of.latest(rows_of.read(measured, rows_of.BenchRow)) if measured is not None else []
    peaks = [row for row in rows if row.model == model and row.dtype == str(kind).removeprefix("torch.")]
    if json:
        typer.echo(jsonlib.dumps(theory.document(needs, forward, peaks), indent=2))
        return
    if markdown:
        typer.echo("\n".join(claim.markdown(needs)))
        return
    theory.show(f"{model}, {dtype}", needs, forward, peaks)


@app.command()
def plot(
    csv: Annotated[Path, typer.Option(help="Rows of bench step.")],
    out: Annotated[Path, typer.Option(help="Folder for the figures.")],
    device: Annotated[str | None, typer.Option(help="Only rows of this device.")] = None,
) -> None:
    """Draw time per step by method, and memory by task."""
    from ..bench import plot as drawing
    from ..bench import row as rows_of

    rows = rows_of.latest(rows_of.read(csv, rows_of.BenchRow))
    devices = list(dict.fromkeys(row.device for row in rows))
    if rows and device is not None and device not in devices:
        raise unknown("device", device, devices)
    rows = [row for row in rows if device in (None, row.device)]
    for path in drawing.draw(rows, out):
        typer.echo(str(path))


def _print(rows: list[BenchRow]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(caption="times in ms per step; ×: mean of mezo-reference over this mean; --json prints every column")
    for column in ("model", "task", "method", "engine", "median", "20–80 %", "mean", "×", "GEMM floor", "copy", "peak"):
        table.add_column(column, justify="left" if column in ("model", "task", "method", "engine") else "right")
    for row in rows:
        table.add_row(
            row.model,
            row.task,
            row.method,
            row.engine,
            f"{row.median_ms:.1f}",
            f"{row.q20_ms:.1f}–{row.q80_ms:.1f}",
            f"{row.mean_ms:.1f}",
            "" if row.ratio_to_reference is None else f"{row.ratio_to_reference:.2f}",
            "" if row.gemm_floor_ms is None else f"{row.gemm_floor_ms:.1f}",
            f"{row.copy_floor_ms:.1f}",
            "" if row.peak_bytes is None else f"{row.peak_bytes / 1e9:.2f} GB",
        )
    Console(width=None if Console().is_terminal else 140).print(table)


def _print_runs(rows: list[RunRow]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(caption="everything included; ×: MeZO's own procedure over this; steady: the last third of the run")
    left = ("model", "task", "method")
    for column in (*left, "steps", "to 100", "to 1000", "mean", "×", "steady", "×", "MeZO", "captures", "peak"):
        table.add_column(column, justify="left" if column in left else "right")
    for row in rows:
        table.add_row(
            *(row.model, row.task, row.method, str(row.steps)),
            *("" if s is None else f"{s:.1f} s" for s in (row.to_100_s, row.to_1000_s)),
            f"{row.mean_ms:.2f} ms",
            "" if row.ratio is None else f"{row.ratio:.1f}",
            f"{row.steady_ms:.2f} ms",
            "" if row.steady_ratio is None else f"{row.steady_ratio:.1f}",
            "" if row.reference_ms is None else f"{row.reference_ms:.0f} ms",
            str(row.captures),
            "" if row.peak_bytes is None else f"{row.peak_bytes / 1e9:.2f} GB",
        )
    Console(width=None if Console().is_terminal else 140).print(table)
