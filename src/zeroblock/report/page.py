"""The report of a run: ``summary.md`` and its figures, from the files of the run folder."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..train.config import Config

SPLITS = ("dev", "test")


def summary(folder: Path) -> None:
    """Write ``summary.md`` and ``figures/*.png`` of a run folder.

    Args:
        folder: with ``config.toml``, ``metrics.jsonl`` and ``summary.json``; ``steps.csv`` where it trained.
    """
    config = Config.load(folder / "config.toml")
    command = (folder / "config.toml").read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
    found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    splits = _evaluations(folder / "metrics.jsonl")
    steps = _steps(folder / "steps.csv")
    if importlib.util.find_spec("matplotlib") is None:
        pictures = ["No figures: `pip install matplotlib`, and they are drawn."]
    else:
        pictures = [
            f"![{name}](figures/{name}.png)" for name in _draw(folder / "figures", config, found, splits, steps)
        ]
    lines = [
        f"# {config.task}, {config.method}, {config.model}",
        "",
        f"    {command}",
        "",
        *_results(found, splits),
        "",
        *_facts(folder, config, found, steps),
        *(line for picture in pictures for line in ("", picture)),
    ]
    (folder / "summary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


Evaluations = dict[str, list[dict[str, Any]]]
Steps = dict[str, NDArray[Any]]


def _evaluations(path: Path) -> Evaluations:
    """The evaluations of each split in the order of their steps; of two at one step, the later."""
    by_step: dict[str, dict[int, dict[str, Any]]] = {split: {} for split in SPLITS}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record.get("kind") == "eval" and record["split"] in by_step:
            record["loss"] = math.nan if record.get("loss") is None else record["loss"]
            by_step[record["split"]][record["step"]] = record
    return {split: [records[step] for step in sorted(records)] for split, records in by_step.items()}


def _steps(path: Path) -> Steps:
    """Columns ``step``, ``block`` and ``loss`` of every step, (n,) each."""
    rows: list[dict[str, str]] = []
    if path.is_file():
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    return {
        "step": np.array([int(row["step"]) for row in rows]),
        "block": np.array([int(row.get("block") or 0) for row in rows]),
        "loss": np.array([float(row["loss"] or "nan") for row in rows]),
    }


def _draw(folder: Path, config: Config, found: Mapping[str, Any], splits: Evaluations, steps: Steps) -> list[str]:
    """Draw what there is to see; the names of the figures."""
    from . import figure

    title = f"{Path(config.task).stem}, {config.method}, {Path(config.model).name}"
    drawn = []
    if len(steps["step"]):
        figure.loss(folder / "loss.png", title, steps, splits["dev"])
        drawn.append("loss")
    if any(len(points) > 1 for points in splits.values()):
        selected = (found["selected_step"], found["selected_by"])
        figure.metric(folder / "metric.png", title, found["metric"], splits, selected)
        drawn.append("metric")
    if len(steps["block"]) and steps["block"].max() > 0:
        count = max(int(steps["block"].max()) + 1, int(found.get("blocks") or 0))
        figure.blocks(folder / "blocks.png", title, steps, count)
        drawn.append("blocks")
    return drawn


def _results(found: Mapping[str, Any], splits: Evaluations) -> list[str]:
    """Before and after, dev-selected and best of the evaluations, each labelled."""
    values = {split: {point["step"]: point for point in splits[split]} for split in SPLITS}
    selected, last = found["selected_step"], max((*values["dev"], *values["test"]), default=0)

    def row(label: str, step: int) -> str:
        return f"| {label} | " + " | ".join(_percent(values[split].get(step)) for split in SPLITS) + " |"

    counts = [f"{split} (n = {splits[split][-1]['n']:,})" if splits[split] else split for split in SPLITS]
    lines = [f"| {found['metric']} | {counts[0]} | {counts[1]} |", "|---|---|---|"]
    if last == 0:
        return [*lines, row("without training", 0)]
    if 0 in values["dev"] or 0 in values["test"]:
        lines.append(row("before training", 0))
    lines.append(row(f"**selected by {found['selected_by']}**: step {selected:,}", selected))
    if last != selected:
        lines.append(row(f"last step: {last:,}", last))
    test = found["test"]
    if test.get("best") is not None:
        lines.append(
            f"| best of the evaluations, as the paper reports; it looks at test | | {100 * test['best']:.1f} % |"
        )
    return lines


def _percent(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return "–"
    exact = point.get("exact_match")
    return f"{100 * point['value']:.1f} %" + ("" if exact is None else f" (exact match {100 * exact:.1f} %)")


def _facts(folder: Path, config: Config, found: Mapping[str, Any], steps: Steps) -> list[str]:
    """What it took: settings, time, memory, and where to find the rest."""
    lines = []
    if config.trains:
        settings = f"lr {config.lr:g}, batch {config.batch_size * config.accumulate}, seed {config.seed}"
        if config.data_seed != config.seed:
            settings += f", data seed {config.data_seed}"
        lines.append(f"- {found['steps']:,} steps: {settings}; all settings are in [config.toml](config.toml)")
    if found.get("skipped"):
        lines.append(f"- steps that moved nothing, because their loss was not finite: {found['skipped']:,}")
    lines.append(f"- {found['seconds']:,.1f} seconds in all")
    if found.get("peak_memory"):
        lines.append(f"- peak memory {found['peak_memory'] / 2**30:.2f} GiB")
    if (folder / "journal.zbj").is_file():
        size = (folder / "journal.zbj").stat().st_size
        lines.append(f"- [journal.zbj](journal.zbj), {size:,} bytes: with the base weights, the weights at any step")
    files = ["metrics.jsonl", *(["steps.csv"] if len(steps["step"]) else [])]
    lines.append(f"- numbers: {', '.join(f'[{name}]({name})' for name in files)}, [summary.json](summary.json)")
    return lines
