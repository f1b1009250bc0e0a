"""``zeroblock bench``: what a step costs in time and memory, beside the published procedures."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ZeroBlockError, unknown

if TYPE_CHECKING:
    import torch

    from ..bench.batch import Pool
    from ..bench.record import Row

app = typer.Typer(help="Measure what a step costs; draw and tabulate what was measured.", no_args_is_help=True)

STAND_IN = "smollm2"
"""Whose tokens stand in for those of a model that has no tokenizer at hand: of like number, folded into its range."""
GRAPHS = {"auto": None, "on": True, "off": False}
FOLDER = "A folder with NAME/train.jsonl and NAME/validation.jsonl; the hub unless given."

Tasks = Annotated[str, typer.Option("--task", help="One task, or several with commas.")]
Tokenizer = Annotated[
    str | None, typer.Option(help=f"Whose tokenizer; the model's own, or {STAND_IN}'s ids for a bare shape of OPT.")
]


@app.command()
def step(
    task: Tasks,
    model: Annotated[str, typer.Option(help="A folder, GGUF file, hub id, or a shape with random weights.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Examples a step.")] = 16,
    methods: Annotated[str, typer.Option(help="Names with commas; NAME-reference is the published procedure.")] = (
        "mezo-reference,mezo,lozo,sparse_mezo,mezo_bcd"
    ),
    engines: Annotated[str, typer.Option(help="sequential, forked, or both with a comma.")] = "sequential,forked",
    data: Annotated[Path | None, typer.Option(help=FOLDER)] = None,
    encoded: Annotated[
        Path | None, typer.Option(help="A file of bench encode, or a folder of TASK.jsonl, instead of --data.")
    ] = None,
    tokenizer: Tokenizer = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="fp32, fp16, bf16, or auto: fp16 on cuda, fp32 on the CPU.")] = "auto",
    steps: Annotated[int, typer.Option(min=1, help="At least so many; up to whole cycles of layers.")] = 20,
    warmup: Annotated[int | None, typer.Option(min=0, help="Steps before the clock; a cycle, on a GPU all.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Exactly --steps, after a short warm-up: for a look.")] = False,
    interval: Annotated[
        int | None, typer.Option(min=1, help="Steps a turn for methods that hold a block, so that a cycle is shorter.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of a packed row; longer batches are split.")] = None,
    graphs: Annotated[str, typer.Option(help="CUDA graphs: auto, on or off.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Append the rows to this file as they are measured.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of noise, order and data.")] = 0,
) -> None:
    """Time and peak memory of a step, by method and engine, and their ratio to MeZO's own procedure."""
    from dataclasses import asdict

    from .. import model as models
    from ..bench import record, variant
    from ..bench.step import Plan, measure, resident

    choices = variant.choose(_names(methods), _names(engines))
    plan = Plan(batch_size, steps, quick, warmup, seed, max_tokens, _graphs(graphs), interval)
    names = _names(task)
    where = models.place(device)
    if csv is not None:
        record.check(csv)
    pools = {name: _pool(name, model, data, encoded, tokenizer, seed) for name in names}
    config: Any = models.skeleton(model).config  # and what it takes to import a model is not the model's memory
    for name, pool in pools.items():
        _check(pool, config, name)
    if csv is not None:
        record.append(csv, [])  # what cannot be written is said before anything is measured
    baseline = resident()
    _say(f"{model} on {where}")
    loaded = _model(model, where, dtype)
    rows: list[Row] = []
    for name, pool in pools.items():
        fitting = pool.folded(int(config.vocab_size))
        for row in measure(loaded, fitting, choices, plan, names=(model, name), baseline=baseline, tell=_say):
            rows.append(row)
            if csv is not None:
                record.append(csv, [row])
    if json:
        typer.echo(jsonlib.dumps([asdict(row) for row in rows], indent=2))
    else:
        _print(rows)


@app.command()
def encode(
    task: Tasks,
    out: Annotated[Path, typer.Option(help="A .jsonl file, or a folder for TASK.jsonl.")],
    data: Annotated[Path | None, typer.Option(help=FOLDER)] = None,
    tokenizer: Annotated[str, typer.Option(help="Whose tokenizer.")] = STAND_IN,
    limit: Annotated[int, typer.Option(min=1, help="Examples at most.")] = 1000,
    max_length: Annotated[int, typer.Option(min=2, help="Longer contexts are cut on the left.")] = 2048,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="The data seed.")] = 0,
) -> None:
    """Write a task's examples as token ids, for a machine that has neither data nor tokenizer."""
    from .. import model as models
    from ..bench import batch
    from ..task import get

    names = _names(task)
    if out.suffix and len(names) > 1:
        raise ZeroBlockError(f"{len(names)} tasks do not go into one file: give --out a folder")
    reader = models.tokenizer(tokenizer)
    for name in names:
        pool = batch.encode(get(name, reader), data, reader, seed=seed, limit=limit, max_length=max_length)
        path = out if out.suffix else out / f"{name}.jsonl"
        batch.write(path, pool)
        typer.echo(f"{path}: {len(pool.encoded)} examples of {name}, the longest {pool.longest} tokens")


@app.command()
def memory(
    model: Annotated[str, typer.Option(help="A folder, hub id, or a shape of OPT; no weights are needed.")],
    dtype: Annotated[str, typer.Option(help="Of the weights: fp16, bf16 or fp32.")] = "fp16",
    rank: Annotated[int, typer.Option(min=1, help="Of LOZO's factors.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a forward, with --length.")] = 32,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens a row: adds what a forward holds.")] = None,
    measured: Annotated[Path | None, typer.Option(help="A CSV of bench step, whose peaks are put beside.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """The paper's theoretical table of peak memory for any model, beside what was measured."""
    from .. import model as models
    from ..bench import memory as theory
    from ..bench import record

    if dtype not in models.DTYPES:
        raise unknown("dtype", dtype, models.DTYPES)
    kind = models.DTYPES[dtype]
    skeleton = models.skeleton(model)
    needs = theory.table(skeleton, kind.itemsize, rank)
    forward = theory.forward(skeleton.config, kind.itemsize, batch_size, length) if length else None
    rows = record.latest(record.read(measured)) if measured is not None else []
    peaks = [row for row in rows if row.model == model and row.dtype == str(kind).removeprefix("torch.")]
    if json:
        typer.echo(jsonlib.dumps(theory.document(needs, forward, peaks), indent=2))
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
    from ..bench import record

    rows = record.latest(record.read(csv))
    there = list(dict.fromkeys(row.device for row in rows))
    if rows and device is not None and device not in there:
        raise unknown("device", device, there)
    rows = [row for row in rows if device in (None, row.device)]
    for path in drawing.draw(rows, out):
        typer.echo(str(path))


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ZeroBlockError("an empty list of names")
    return names


def _graphs(text: str) -> bool | None:
    if text not in GRAPHS:
        raise unknown("choice of --graphs", text, GRAPHS)
    return GRAPHS[text]


def _pool(name: str, model: str, data: Path | None, encoded: Path | None, tokenizer: str | None, seed: int) -> Pool:
    """The examples of a task, from token ids or from the data."""
    from .. import model as models
    from ..bench import batch
    from ..task import get

    if encoded is not None:
        if data is not None or tokenizer is not None:
            raise ZeroBlockError("--encoded takes the place of --data and --tokenizer: give one or the other")
        return batch.read(encoded / f"{name}.jsonl" if encoded.is_dir() else encoded, get(name).over)
    reader = models.tokenizer(tokenizer or (STAND_IN if model in models.OPT else model))
    return batch.encode(get(name, reader), data, reader, seed=seed, max_length=_positions(models.config(model)))


def _positions(config: Any) -> int:
    return min(2048, getattr(config, "max_position_embeddings", None) or 2048)


def _check(pool: Pool, config: Any, task: str) -> None:
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and pool.longest > most:
        raise ZeroBlockError(
            f"{task} has an example of {pool.longest} tokens, the model reads {most}: encode with --max-length {most}"
        )


def _model(name: str, device: torch.device, dtype: str) -> Any:
    from .. import model as models

    # fp16, the published procedures' choice, where the library would choose bf16
    kind = "fp16" if dtype == "auto" and device.type == "cuda" else dtype
    return models.load(name, kind, device, random_weights=name in models.OPT)


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _print(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(caption="ms: of a step; ×: means, to mezo-reference; floors: see zeroblock bench step --json")
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
