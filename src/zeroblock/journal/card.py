"""The card of an exported file: its origin, its results, and how to use it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..record import Record
from .header import Header

LOSS_STEPS = 100
"""Steps over which the card averages the loss, at the beginning and at the end."""
UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError)


def card(header: Header, records: Sequence[Record], run: Path) -> str:
    """The card as Markdown.

    Args:
        header: the header of the run.
        records: the records of the run, at least one.
        run: the run's folder, whose ``metrics.jsonl`` adds results, or the journal itself.
    """
    name = header.extra.get("method") or "zeroth-order"
    title = " on ".join(filter(None, (f"{header.model or 'a model'} fine-tuned with {name}", header.task)))
    first, last = _mean(records[:LOSS_STEPS]), _mean(records[-LOSS_STEPS:])
    lines = [
        f"# {title}",
        "",
        f"{len(records):,} steps without a gradient, as a journal: the base weights and this file give the fine-tuned "
        "weights, bit for bit.",
        "",
        f"- base: {header.model or 'not named'}, {header.dtype}, fingerprint {header.fingerprint}",
        f"- loss: {first:.4f} over the first {min(LOSS_STEPS, len(records))} steps, {last:.4f} over the last",
        *_results(run, len(records)),
        *(f"- {part}: {value}" for part, value in header.parts.items()),
        f"- seed: {header.seed}",
        f"- weight decay: {header.weight_decay:g}",
        f"- written by zeroblock {header.versions.get('zeroblock')}, torch {header.versions.get('torch')}",
        "",
        "```",
        f"zeroblock apply FILE.zbj --model {header.model or 'BASE'} --out FOLDER",
        "```",
        "",
        "```python",
        "import zeroblock as zb",
        "",
        'model = zb.load("FILE.zbj")  # loads the base, and makes the adapter'
        if header.extra.get("adapter")
        else 'zb.load(model, "FILE.zbj")  # model with the base weights; zb.unload(model) takes it out again',
        "```",
    ]
    return "\n".join(lines) + "\n"


def _mean(records: Sequence[Record]) -> float:
    losses = [record.loss for record in records if math.isfinite(record.loss)]
    return sum(losses) / len(losses) if losses else math.nan


def _results(run: Path, step: int) -> list[str]:
    """The evaluations that the run made after exactly this step."""
    lines = []
    try:
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            entry: Any = json.loads(line)
            if entry["kind"] == "eval" and entry["step"] == step:
                lines.append(f"- {entry['metric']}: {entry['value']:.4f} of {entry['n']:,} {entry['split']} examples")
    except UNREADABLE:  # a journal by itself, or a line that is being written or was made up
        pass
    return lines
