"""``zeroblock inspect``: what a journal holds, and whether it is whole."""

from __future__ import annotations

import json as jsonlib
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.text import Text

    from ..journal import Contents, Record

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 56


def inspect(
    run: Annotated[Path, typer.Argument(help="A run's folder, a journal or an exported file.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a journal: its header, how far it got, losses, blocks, and whether every record is intact."""
    from ..journal import read
    from ..journal.file import locate

    contents = read(run)
    size = locate(run).stat().st_size
    found = _described(contents, size)
    if json:
        typer.echo(jsonlib.dumps(found, indent=2))
        return
    _print(contents, found)


def _described(contents: Contents, size: int) -> dict[str, Any]:
    header, records = contents.header, contents.records
    visits = Counter(record.block for record in records)
    squares: dict[int, list[float]] = defaultdict(list)
    for record in records:
        if record.finite:
            squares[record.block] += [c * c for c in record.coeffs]
    return {
        "model": header.model,
        "fingerprint": header.fingerprint,
        "dtype": header.dtype,
        "task": header.task,
        "data": header.data,
        "parts": header.parts,
        "seed": header.seed,
        "weight_decay": header.weight_decay,
        "versions": header.versions,
        "extra": header.extra,
        "steps": len(records),
        "skipped": sum(not record.finite for record in records),
        "loss": _finite(records[-1].loss) if records else None,
        "curve": [_finite(value) for value in curve(records)],
        "lr": _finite(records[-1].lr) if records else None,
        "coefficients": sizes(records),
        "blocks": [
            {"name": name, "visits": visits[i], "rms": _rms(squares[i])} for i, name in enumerate(header.blocks)
        ],
        "bytes": size,
        "record_bytes": contents.layout.size,
        "torn_bytes": contents.torn,
        "exported": header.steps is not None,
        "card": header.card,
    }


def _rms(squares: Sequence[float]) -> float | None:
    return math.sqrt(math.fsum(squares) / len(squares)) if squares else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def curve(records: Sequence[Record], width: int = WIDTH) -> list[float]:
    """Mean losses of equal stretches of the run, at most ``width`` of them; NaN where none was finite."""
    width = min(width, len(records))
    means = []
    for i in range(width):
        stretch = records[len(records) * i // width : len(records) * (i + 1) // width]
        losses = [record.loss for record in stretch if math.isfinite(record.loss)]
        means.append(sum(losses) / len(losses) if losses else math.nan)
    return means


def sizes(records: Sequence[Record]) -> dict[str, float] | None:
    """Magnitudes of the coefficients: the middle one, that of one in a hundred, the largest and its step."""
    found = sorted((abs(c), record.step) for record in records if record.finite for c in record.coeffs)
    if not found:
        return None
    (middle, _), (high, _), (most, step) = found[len(found) // 2], found[len(found) * 99 // 100], found[-1]
    return {"median": middle, "hundredth": high, "largest": most, "step": step}


def sparkline(values: Sequence[float]) -> str:
    """Values as bars of eighths; a space where there is none.

    >>> sparkline([0.0, 1.0, 2.0, math.nan])
    '▁▅█ '
    """
    finite = [value for value in values if math.isfinite(value)]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    scale = (len(BARS) - 1) / span if span else 0.0
    return "".join(BARS[round((v - low) * scale)] if math.isfinite(v) else " " for v in values)


def _print(contents: Contents, found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(show_header=False)
    rows = {
        "base": f"{found['model'] or 'not named'}, {found['dtype']}, fingerprint {found['fingerprint']}",
        "task": found["task"],
        "data": found["data"],
        **found["parts"],
        "seed": found["seed"],
        "weight decay": f"{found['weight_decay']:g}",
        **{name: str(value) for name, value in found["extra"].items()},
        "written by": ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
        "steps": f"{found['steps']:,}" + (f", {found['skipped']:,} of them skipped" if found["skipped"] else ""),
        "size": f"{found['bytes']:,} bytes, {found['record_bytes']} a step",
        "integrity": "every checksum matches" + (f"; {contents.note}" if contents.torn else ""),
    }
    for name, value in rows.items():
        if value != "":
            table.add_row(_shown(name), _shown(value))
    console.print(table)
    if not found["steps"]:
        return
    losses = [value for value in curve(contents.records) if math.isfinite(value)]
    if losses:
        line = sparkline(curve(contents.records))
        console.print(f"loss    {losses[0]:.4f} {line} {losses[-1]:.4f}", markup=False)
    if found["coefficients"]:
        median, high, most, step = found["coefficients"].values()
        told = f"{median:.3g} in the middle, one in a hundred above {high:.3g}, most {most:.3g} at step {step:,}"
        console.print(f"|c|     {told}", markup=False)
    if len(found["blocks"]) > 1:
        most = max(block["visits"] for block in found["blocks"])
        blocks = Table("block", "steps", "", "rms c", title="steps on each block", title_justify="left")
        for block in found["blocks"]:
            rms = "" if block["rms"] is None else f"{block['rms']:.3g}"
            bar = "█" * math.ceil(30 * block["visits"] / most)
            blocks.add_row(_shown(block["name"]), f"{block['visits']:,}", bar, rms)
        console.print(blocks)
    if found["card"]:
        console.print(Markdown("".join(c for c in found["card"] if c.isprintable() or c == "\n")))


def _shown(value: object) -> Text:
    """A stranger's text: no markup, no control characters."""
    from rich.text import Text

    return Text("".join(c if c.isprintable() else "�" for c in str(value)))
