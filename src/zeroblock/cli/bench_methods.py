"""``zeroblock bench methods``: the step of every method on one model."""

from __future__ import annotations

import json as jsonlib
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .bench import (
    BatchSize,
    Csv,
    Data,
    Device,
    Dtype,
    EncodedFile,
    Json,
    Model,
    Tokenizer,
    check_lengths,
    model_of,
    pool_of,
)  # fmt: skip

if TYPE_CHECKING:
    from ..bench.methods import MethodRow

YARDSTICK = "mezo_bcd"


def methods(
    task: Annotated[str, typer.Option(help="The task whose examples are measured.")],
    model: Model,
    names: Annotated[str, typer.Option("--methods", help="Names separated by commas; all by default.")] = "all",
    batch_size: BatchSize = 16,
    seconds: Annotated[float, typer.Option(help="Seconds that are measured per method; as many warm up.")] = 1.2,
    total_seconds: Annotated[
        float | None, typer.Option(help="Begin no more methods after so many seconds; loading is not counted.")
    ] = None,
    data: Data = None,
    encoded: EncodedFile = None,
    tokenizer: Tokenizer = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
    csv: Csv = None,
) -> None:
    """Measure the step of every method beside mezo_bcd's, in one process; a row says why a method cannot run."""
    from dataclasses import asdict

    from .. import model as models
    from ..bench import methods as measuring
    from ..bench import row as rows_of
    from ..bench.step import resident
    from ..method import METHODS, get

    wanted = [YARDSTICK, *METHODS] if names == "all" else [name.strip() for name in names.split(",")]
    wanted = list(dict.fromkeys(wanted))
    for name in wanted:
        get(name)
    where = models.find_device(device)
    if csv is not None:
        rows_of.append(csv, [], measuring.MethodRow)
    pool = pool_of(task, model, data, encoded, tokenizer, 0)
    config: Any = models.skeleton(model).config
    check_lengths(pool, config, task)
    idle = resident()
    typer.echo(f"{model} on {where}", err=True)
    loaded = model_of(model, where, dtype)
    until = float("inf") if total_seconds is None else time.monotonic() + total_seconds
    rows: list[MethodRow] = []
    for row in measuring.measure(
        loaded, pool.folded(int(config.vocab_size)), wanted, names=(model, task), batch_size=batch_size,
        seconds=seconds, until=until, idle_bytes=idle, tell=lambda text: typer.echo(text, err=True),
    ):  # fmt: skip
        rows.append(row)
        if csv is not None:
            rows_of.append(csv, [row], measuring.MethodRow)
    if json:
        typer.echo(jsonlib.dumps([asdict(row) for row in rows], indent=2))
    else:
        typer.echo("\n".join(measuring.table(rows)))
