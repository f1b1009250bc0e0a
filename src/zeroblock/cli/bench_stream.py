"""``zeroblock bench stream``: a step on streamed weights, compared with the time of its copies and its products."""

from __future__ import annotations

import dataclasses
import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ZeroBlockError, unknown
from .bench_shared import Sheet, listed, pool_of


def stream(
    model: Annotated[str, typer.Option(help="The shape, with random weights: opt-13b, opt-30b, opt-66b, a folder.")],
    encoded: Annotated[Path, typer.Option(help="Token ids of bench encode: a file, or a folder of TASK.jsonl.")],
    task: Annotated[str, typer.Option(help="The task of the token ids, or several with commas between.")] = "sst2",
    method: Annotated[str, typer.Option(help="A method of zeroblock methods.")] = "mezo_bcd",
    memory: Annotated[str | None, typer.Option(help="Memory of the device to use, as in 4GB.")] = None,
    offload: Annotated[str, typer.Option(help="Storage of the weights: host or disk.")] = "host",
    weights: Annotated[str | None, typer.Option(help="Store the layers' matrices as int8 or int4.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Length of a row; by default at most 4,096.")] = None,
    batch_size: Annotated[str, typer.Option(help="Examples per step; several with commas between.")] = "16",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps, after two warm-up steps.")] = 5,
    dtype: Annotated[str, typer.Option(help="fp16, bf16 or fp32.")] = "fp16",
    device: Annotated[str, typer.Option(help="auto, cuda, or cpu for a trial run.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per batch size.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Append the rows to this file.")] = None,
) -> None:
    """Measure steps on streamed weights, and how near they come to the longer of copying and computing.

    For example: `zeroblock bench stream --model opt-13b --memory 4GB --encoded DIR --batch-size 16,64,256`
    """
    from .. import model as models
    from ..amount import nbytes
    from ..bench.stream import StreamRow, measure
    from ..method import METHODS
    from ..offload.placing import PLACES

    sizes = [int(size) for size in batch_size.split(",") if size.strip().isdecimal()]
    if not sizes or len(sizes) != len(batch_size.split(",")) or min(sizes) < 1:
        raise ZeroBlockError(f"--batch-size takes numbers with commas between, such as 16,64, got {batch_size!r}")
    pools = {name: pool_of(name, model, None, encoded, None, 0) for name in listed(task)}
    target = models.find_device(device)
    if offload not in PLACES:
        raise unknown("place for weights:", offload, PLACES)
    if offload == "disk" and target.type == "cpu":
        raise ZeroBlockError("on the CPU a file is used where it is, and nothing is copied: leave out --offload")
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    sheet = Sheet(StreamRow, csv)
    rows = measure(
        model, pools, method=method, dtype=models.precision(dtype, target), device=target,
        offload=offload, memory=None if memory is None else nbytes(memory),
        weights=weights, tokens=max_tokens, batch_sizes=sizes, steps=steps,
    )  # fmt: skip
    for row in rows:
        sheet.add(row)
        if json:
            typer.echo(jsonlib.dumps(dataclasses.asdict(row)))
            continue
        typer.echo(
            f"{row.task}, batch {row.batch_size:>4}, {row.tokens:>6,} tokens: {row.step_ms:8.1f} ms per step, "
            f"{row.example_ms:.1f} per example; copies {row.copy_ms:.1f} at {row.bandwidth / 1e9:.1f} GB/s, products "
            f"{row.compute_ms:.1f}: {row.of_bound:.0%} of the bound"
        )
