"""``zeroblock methods``: the table of methods."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

import typer


def methods(
    name: Annotated[str | None, typer.Argument(help="One method, in full.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON: name, parts, defaults and citation.")] = False,
) -> None:
    """List the methods: what each is composed of, its defaults and where it is from."""
    from ..method import METHODS, describe, get

    rows = [describe(get(name))] if name else [describe(method) for method in METHODS.values()]
    if json:
        typer.echo(jsonlib.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if name:
        row = rows[0]
        console.print(f"[bold]{row['name']}[/bold]: {row['summary']}\n")
        for group in ("parts", "defaults"):
            table = Table(title=group, title_justify="left", show_header=False)
            for key, value in row[group].items():
                table.add_row(key, str(value))
            console.print(table)
        console.print(f"\n{row['citation']}", highlight=False)
        return
    table = Table()
    for column in ("method", "partition", "schedule", "subspace", "rule", "interval"):
        table.add_column(column, overflow="fold")
    for row in rows:
        parts = {part: value.partition("(")[0] for part, value in row["parts"].items()}
        schedule = "–" if parts["partition"] == "whole" else parts["schedule"]
        table.add_row(row["name"], parts["partition"], schedule, parts["subspace"], parts["rule"], parts["interval"])
    console.print(table)
    console.print("zeroblock methods NAME shows one of them in full.", highlight=False)
