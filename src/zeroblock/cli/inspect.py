"""``zeroblock inspect``: show the contents of a journal, and whether it is intact."""

from __future__ import annotations

import json as jsonlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.text import Text

    from ..journal import Contents, Header
    from ..journal.format import Records

BARS = "▁▂▃▄▅▆▇█"
CURVE_POINTS = 56
BAR_CHARACTERS = 8
MAX_SHOWN_CHARACTERS = 10_000


def inspect(
    run: Annotated[Path, typer.Argument(help="A run's folder, a journal or an exported file.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a journal: its header, how far it got, losses, blocks, and whether every record is intact.

    The data of a run appear as hashes, which distinguish data sets and reveal nothing about the rows.
    """
    from ..journal import read
    from ..journal.format import locate
    from ..journal.share import finished_steps

    contents = read(run)
    missing = max(0, finished_steps(contents, run) - len(contents.records))
    described = _described(contents, locate(run).stat().st_size, missing)
    if json:
        typer.echo(jsonlib.dumps(described, indent=2))
        return
    _print(contents, described)


def _described(contents: Contents, size: int, missing: int) -> dict[str, Any]:
    import numpy as np

    header, records = contents.header, contents.records
    finite, coeffs = records.finite, records.coeffs.astype(np.float64)
    moves, (steps, active) = moved(header, records), visits(header, records)
    blocks = []
    for i, name in enumerate(header.blocks):
        mine = steps[active == i]
        taken = mine[finite[mine]]
        squares, lengths = coeffs[taken] ** 2, None if moves is None else moves[taken]
        blocks.append(
            {
                "name": name,
                "visits": len(mine),
                "rms": math.sqrt(squares.mean()) if squares.size else None,
                "step": float(np.median(lengths)) if lengths is not None and lengths.size else None,
                "moved": math.sqrt(float(np.sum(lengths**2))) if lengths is not None and lengths.size else None,
            }
        )
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
        "skipped": int((~finite).sum()),
        "loss": _finite(float(records.loss[-1])) if len(records) else None,
        "curve": [_finite(value) for value in curve(records.loss)],
        "lr": _finite(float(records.lr[-1])) if len(records) else None,
        "coefficients": sizes(coeffs),
        "blocks": blocks,
        "bytes": size,
        "record_bytes": contents.layout.size,
        "torn_bytes": contents.torn,
        "damaged": contents.damaged,
        "missing_steps": missing,
        "exported": header.steps is not None,
        "card": header.card,
    }


def visits(header: Header, records: Records) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The pairs of a step and a block that it moved: (n,) steps and (n,) blocks.

    A record names one block; if its step moves several, the others follow from the schedule.
    """
    import numpy as np

    turns = header.turns()
    if turns is None or turns.most == 1:
        return np.arange(len(records)), records.block.astype(np.int64)
    turn, pairs = turns.first(), []
    for step, record in enumerate(records):
        pairs += [(step, record.block), *((step, block) for block, _ in turn.others)]
        turn = turns.after(turn, record)
    steps, blocks = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return steps, blocks


def moved(header: Header, records: Records) -> NDArray[np.float64] | None:
    """(steps,) the relative size of every step, rms of the step / rms of the weights; None if it is unknown.

    Without a learning rate, the journal is enough to compute it; else the weights are needed, see ``report.html``.
    """
    import numpy as np

    from ..report.move import Moves

    turns = header.turns()
    most = 0 if turns is None else turns.most  # an unknown schedule may choose any number of blocks
    moves = Moves(header.parts, len(header.blocks), most, clip=header.method.get("clip"))
    if not moves.known:
        return None
    steps = zip(records.block.tolist(), records.lr.tolist(), records.coeffs.tolist(), strict=True)
    return np.array([moves.next(*step) for step in steps], dtype=np.float64)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def curve(losses: NDArray[np.float64], points: int = CURVE_POINTS) -> list[float]:
    """Mean losses of equal stretches of the run, at most ``points`` of them; NaN if no loss in one was finite."""
    import numpy as np

    points = min(points, len(losses))
    means = []
    for i in range(points):
        stretch = losses[len(losses) * i // points : len(losses) * (i + 1) // points]
        known = stretch[np.isfinite(stretch)]
        means.append(float(known.mean()) if known.size else math.nan)
    return means


def sizes(coeffs: NDArray[np.float64]) -> dict[str, float] | None:
    """Magnitudes of the coefficients, (steps, probes): the median, the 99th percentile, the largest and its step."""
    import numpy as np

    steps = np.flatnonzero(np.isfinite(coeffs).all(axis=1))
    if not steps.size:
        return None
    each = np.abs(coeffs[steps])
    ordered, largest = np.sort(each, axis=None), int(each.max(axis=1).argmax())
    return {
        "median": float(ordered[len(ordered) // 2]),
        "hundredth": float(ordered[len(ordered) * 99 // 100]),
        "largest": float(ordered[-1]),
        "step": int(steps[largest]),
    }


def sparkline(values: Sequence[float]) -> str:
    """Values as a line of bars, with a space for a value that is not finite.

    >>> sparkline([0.0, 1.0, 2.0, math.nan])
    '▁▅█ '
    """
    finite = [value for value in values if math.isfinite(value)]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    scale = (len(BARS) - 1) / span if span else 0.0
    return "".join(BARS[round((v - low) * scale)] if math.isfinite(v) else " " for v in values)


def _print(contents: Contents, described: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.table import Column, Table

    console = Console(highlight=False)
    table = Table(show_header=False)
    steps, skipped = described["steps"], described["skipped"]
    rows = {
        "base": f"{described['model'] or 'not named'}, {described['dtype']}, fingerprint {described['fingerprint']}",
        "task": described["task"],
        "data": described["data"],
        **described["parts"],
        "seed": described["seed"],
        "weight decay": f"{described['weight_decay']:g}",
        **{name: str(value) for name, value in described["extra"].items()},
        "written by": ", ".join(f"{name} {version}" for name, version in described["versions"].items()),
        "steps": f"{steps:,}" + (f", {skipped:,} of them skipped" if skipped else ""),
        "size": f"{described['bytes']:,} bytes, {described['record_bytes']} per step",
        "integrity": _integrity(contents, described["missing_steps"]),
    }
    for name, value in rows.items():
        if value != "":
            table.add_row(_shown(name), _shown(value))
    console.print(table)
    if not steps:
        return
    line = curve(contents.records.loss)
    losses = [value for value in line if math.isfinite(value)]
    if losses:
        console.print(f"loss    {losses[0]:.4f} {sparkline(line)} {losses[-1]:.4f}", markup=False)
    if described["coefficients"]:
        median, high, largest, step = described["coefficients"].values()
        text = f"median {median:.3g}, one in a hundred above {high:.3g}, largest {largest:.3g} at step {step:,}"
        console.print(f"|c|     {text}", markup=False)
    if len(described["blocks"]) > 1:
        visits = max(block["visits"] for block in described["blocks"])
        relative = any(block["step"] is not None for block in described["blocks"])
        sizes = ("typical step", "moved in all") if relative else ()
        title = "steps on each block" + (", their size relative to the weights" if relative else "")
        blocks = Table(Column("block", no_wrap=True), "steps", "", "rms c", *sizes, title=title, title_justify="left")
        for block in described["blocks"]:
            rms = "" if block["rms"] is None else f"{block['rms']:.3g}"
            bar = "█" * math.ceil(BAR_CHARACTERS * block["visits"] / visits)
            shares = [_percent(block[name]) for name in ("step", "moved")] if relative else []
            blocks.add_row(_shown(block["name"]), f"{block['visits']:,}", bar, rms, *shares)
        console.print(blocks)
    if described["card"]:
        card = "\n".join(shown(line, MAX_SHOWN_CHARACTERS) for line in described["card"].splitlines())
        console.print(Markdown(card, hyperlinks=False))  # print the target of every link


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2g} %"


def _integrity(contents: Contents, missing: int) -> str:
    steps = len(contents.records)
    lost = f"; the run finished with {steps + missing:,} steps, {missing:,} {'are' if missing > 1 else 'is'} missing"
    if contents.damaged or missing:
        tail = f"; the file ends with {contents.note}" if contents.torn else ""
        return f"{steps:,} steps are intact{tail}{lost if missing else ''}"
    return "every checksum matches" + (f"; {contents.note}" if contents.torn else "")


def _shown(value: object) -> Text:
    """Untrusted text, without markup and control characters."""
    from rich.text import Text

    return Text(shown(value, MAX_SHOWN_CHARACTERS))
