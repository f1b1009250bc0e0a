"""``zeroblock methods``: the table of methods."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import unknown

TABLE = Path(__file__).with_name("methods.json")
"""The description of every method, written by ``make methods``.

Describing a method means composing it, which imports torch: 3 s of the 4 that the command used to
take.  A test compares the file with the methods themselves.
"""
UNSCALED = (
    "These are the parts with a learning rate. Without one, every method but zo_muon draws Relative directions, eps is "
    "0.04 of the weights, and coefficients are divided by their running size (Normalized) where the rule needs it."
)


def methods(
    name: Annotated[str | None, typer.Argument(help="Show this method in full.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON: name, parts, defaults and citation.")] = False,
) -> None:
    """List the methods: the parts of each, its defaults and its source.

    `zeroblock train --method NAME` takes one. The default, mezo_bcd, is the one to start with.
    """
    rows: list[dict[str, Any]] = jsonlib.loads(TABLE.read_text(encoding="utf-8"))
    if name:
        names = [row["name"] for row in rows]
        if name not in names:
            raise unknown("method", name, names)
        rows = [rows[names.index(name)]]
    if json:
        typer.echo(jsonlib.dumps(rows, indent=2))
    elif name:
        _print_one(rows[0])
    else:
        _print_all(rows)


def describe_all() -> list[dict[str, Any]]:
    """The rows of :data:`TABLE`, from the methods themselves."""
    from ..method import METHODS, describe

    rows: list[dict[str, Any]] = jsonlib.loads(jsonlib.dumps([describe(method) for method in METHODS.values()]))
    return rows


def write_table() -> None:
    """Bring :data:`TABLE` up to date: ``make methods``."""
    TABLE.write_text(jsonlib.dumps(describe_all(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _print_one(row: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"[bold]{row['name']}[/bold]: {row['summary']}\n")
    for group in ("parts", "defaults"):
        table = Table(title=group, title_justify="left", show_header=False)
        for key, value in row[group].items():
            table.add_row(key, str(value))
        console.print(table)
    console.print(f"\n{UNSCALED}", highlight=False)
    console.print(f"\n{row['citation']}", highlight=False)


def _print_all(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in ("method", "partition", "schedule", "subspace", "rule", "interval"):
        table.add_column(column, overflow="fold")
    for row in rows:
        parts = {part: value.partition("(")[0] for part, value in row["parts"].items()}
        schedule = "–" if parts["partition"] == "whole" else parts["schedule"]
        table.add_row(row["name"], parts["partition"], schedule, parts["subspace"], parts["rule"], parts["interval"])
    console = Console()
    console.print(table)
    console.print("zeroblock methods NAME shows one of them in full.", highlight=False)
