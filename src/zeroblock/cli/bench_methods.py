"""``zeroblock bench methods``: the step of every method on one model."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from .bench_shared import (
    BatchSize,
    Csv,
    Data,
    Device,
    Dtype,
    EncodedFile,
    Json,
    Model,
    Sheet,
    Task,
    Tokenizer,
    listed,
    say,
    stand,
)

YARDSTICK = "mezo_bcd"


def methods(
    task: Task,
    model: Model,
    names: Annotated[str, typer.Option("--methods", help="Names separated by commas; all by default.")] = "all",
    batch_size: BatchSize = 16,
    seconds: Annotated[
        float, typer.Option(help="Measured seconds per method, after a warm-up of the same length.")
    ] = 1.2,
    total_seconds: Annotated[
        float | None, typer.Option(help="Start no further method after this many seconds; loading is not counted.")
    ] = None,
    data: Data = None,
    encoded: EncodedFile = None,
    tokenizer: Tokenizer = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
    csv: Csv = None,
) -> None:
    """Measure every method's step, compared with mezo_bcd's in the same process; a row says why a method cannot run."""
    from ..bench import methods as measuring
    from ..method import METHODS, get

    wanted = list(dict.fromkeys([YARDSTICK, *METHODS] if names == "all" else listed(names)))
    for name in wanted:
        get(name)
    sheet = Sheet(measuring.MethodRow, csv)
    on = stand(model, [task], data, encoded, tokenizer, device, dtype)
    until = float("inf") if total_seconds is None else time.monotonic() + total_seconds
    for row in measuring.measure(
        on.model, on.pools[task], wanted, names=(model, task), batch_size=batch_size,
        seconds=seconds, until=until, idle_bytes=on.idle, tell=say,
    ):  # fmt: skip
        sheet.add(row)
    sheet.show(json, lambda rows: typer.echo("\n".join(measuring.table(rows))))
