"""``zeroblock blocks``: the blocks that a partition cuts a model into; no weights are needed."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated, Any

import typer

from .replay import Remote


def blocks(
    model: Annotated[
        str, typer.Option(help="opt-125m, opt-1.3b, opt-13b, smollm2, a folder, a GGUF file, or a hub id.")
    ],
    partition: Annotated[str, typer.Option(help="whole, layers, layers:K (K layers per block) or linears.")] = "layers",
    trust_remote_code: Remote = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the blocks of a model, from input to output."""
    from ..block import by_name
    from ..model import skeleton

    cut = by_name(partition)
    module = skeleton(model, trust_remote_code=trust_remote_code)
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    rows: list[dict[str, Any]] = [
        {"name": b.name, "tensors": len(b.params), "numel": sum(sizes[p] for p in b.params)} for b in cut(module)
    ]
    if json:
        typer.echo(jsonlib.dumps({"model": model, "partition": partition, "n": len(rows), "blocks": rows}))
        return
    from rich.console import Console
    from rich.table import Table

    total = sum(row["numel"] for row in rows)
    table = Table(title=f"{model}, {partition}: {len(rows)} blocks, {total:,} weights", title_justify="left")
    for column, justify in (("#", "right"), ("block", "left"), ("tensors", "right"), ("weights", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for i, row in enumerate(rows):
        table.add_row(str(i), row["name"], str(row["tensors"]), f"{row['numel']:,}")
    Console().print(table)
