"""The card of an exported file: what it is, what it was measured at, how to use it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..record import Record
from .header import Header

TAIL = 100
"""Steps whose mean is the loss at the beginning and at the end."""


def card(header: Header, records: Sequence[Record], run: Path) -> str:
    """Markdown for people.

    Args:
        header: of the run.
        records: at least one.
        run: its folder, whose ``metrics.jsonl`` adds results, or a file.
    """
    name = header.extra.get("method") or "zeroth-order"
    title = " on ".join(filter(None, (f"{header.model or 'a model'} fine-tuned with {name}", header.task)))
    first, last = _mean(records[:TAIL]), _mean(records[-TAIL:])
    lines = [
        f"# {title}",
        "",
        f"{len(records):,} steps without a gradient, as a journal: the base weights and this file give the fine-tuned "
        "weights, bit for bit.",
        "",
        f"- base: {header.model or 'not named'}, {header.dtype}, fingerprint {header.fingerprint}",
        f"- loss: {first:.4f} over the first {min(TAIL, len(records))} steps, {last:.4f} over the last",
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
        'zb.load(model, "FILE.zbj")  # model with the base weights; zb.unload(model) takes it out again',
        "```",
    ]
    return "\n".join(lines) + "\n"


def _mean(records: Sequence[Record]) -> float:
    losses = [record.loss for record in records if math.isfinite(record.loss)]
    return sum(losses) / len(losses) if losses else math.nan


def _results(run: Path, step: int) -> list[str]:
    """What the run measured after this very step, if anything."""
    lines = []
    try:
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            found: Any = json.loads(line)
            if found["kind"] == "eval" and found["step"] == step:
                lines.append(f"- {found['metric']}: {found['value']:.4f} of {found['n']:,} {found['split']} examples")
    except (OSError, ValueError, KeyError, TypeError):  # a journal by itself, or a line that is being written
        pass
    return lines
