"""The page of a run: ``summary.md`` and its figures, from the files of the run folder."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import atomic
from ..errors import ZeroBlockError, shown
from ..evaluate.measurement import MAX_FLOAT, MAX_SHOWN, SPLITS, read_measurements
from ..task.metric import worded
from ..train.config import Config, recorded
from .summary import MAX_BLOCKS, check_summary, ending

MAX_STEP = 2**32
"""Steps that a run may have."""
MAX_HEADING = 2000
"""Characters of the heading and of the command."""


def write_page(folder: Path) -> None:
    """Write ``summary.md`` and ``figures/*.png`` of a run folder.

    Args:
        folder: with ``config.toml``, ``metrics.jsonl`` and ``summary.json``; ``steps.csv`` where it trained.
    """
    config = recorded(folder / "config.toml", trust_remote_code=True)  # no model is loaded here
    command = (folder / "config.toml").read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
    name = ""
    try:
        name = "summary.json"
        summary = check_summary(json.loads((folder / name).read_text(encoding="utf-8")))
        summary |= {key: shown(summary[key]) for key in ("metric", "selected_by")}
        name = "metrics.jsonl"
        splits = _evaluations(folder / name)
        name = "steps.csv"
        steps = _steps(folder / name, int(summary.get("blocks") or MAX_BLOCKS))
    except (ValueError, KeyError, TypeError, RecursionError, csv.Error) as error:
        raise ZeroBlockError(f"{folder / name} is damaged ({error}): the report of the run needs it whole") from error
    if importlib.util.find_spec("matplotlib") is None:
        pictures = ["No figures: they need `pip install matplotlib`."]
    else:
        pictures = [
            f"![{name}](figures/{name}.png)" for name in _draw(folder / "figures", config, summary, splits, steps)
        ]
    lines = [
        f"# {shown(f'{config.task}, {config.method}, {config.model}', MAX_HEADING)}",
        "",
        f"    {shown(command, MAX_HEADING)}",
        "",
        *_results(summary, splits),
        *ending(folder, summary),
        "",
        *_facts(folder, config, summary, steps),
        *(line for picture in pictures for line in ("", picture)),
    ]
    atomic.write(folder / "summary.md", "\n".join(lines) + "\n")


Evaluations = dict[str, list[dict[str, Any]]]
Steps = dict[str, NDArray[Any]]


def _evaluations(path: Path) -> Evaluations:
    """The evaluations of each split in the order of their steps; of two at one step, the later."""
    by_step: dict[str, dict[int, dict[str, Any]]] = {split: {} for split in SPLITS}
    for _, measurement in read_measurements(path):
        by_step[measurement.split][measurement.step] = {
            "step": measurement.step,
            **dataclasses.asdict(measurement.evaluation),
        }
    return {split: [points[step] for step in sorted(points)] for split, points in by_step.items()}


def _steps(path: Path, blocks: int) -> Steps:
    """The columns ``step``, ``block`` and ``loss``, (n,) each.

    Args:
        path: the file; one that is missing has no rows.
        blocks: the number of blocks.
    """
    rows: list[dict[str, str]] = []
    if path.is_file():
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    loss = np.array([float(row["loss"] or "nan") for row in rows])
    return {
        "step": np.array([_index("step", row["step"], MAX_STEP) for row in rows]),
        "block": np.array([_index("block", row.get("block") or 0, blocks) for row in rows]),
        "loss": np.where(np.abs(loss) < MAX_FLOAT, loss, np.nan),
    }


def _index(name: str, text: str | int, count: int) -> int:
    number = int(text)
    if not 0 <= number < count:
        raise ValueError(f"{name} is {shown(number, MAX_SHOWN)}, of {count}")
    return number


def _draw(folder: Path, config: Config, summary: Mapping[str, Any], splits: Evaluations, steps: Steps) -> list[str]:
    """Draw the figures that the run has data for, and return their names."""
    from . import figure

    title = shown(f"{Path(config.task).stem}, {config.method}, {Path(config.model).name}")
    drawn = []
    if len(steps["step"]):
        figure.loss(folder / "loss.png", title, steps, splits["dev"])
        drawn.append("loss")
    if any(len(points) > 1 for points in splits.values()):
        selected = (summary["selected_step"], summary["selected_by"])
        figure.metric(folder / "metric.png", title, summary["metric"], splits, selected)
        drawn.append("metric")
    if len(steps["block"]) and steps["block"].max() > 0:
        count = max(int(steps["block"].max()) + 1, int(summary.get("blocks") or 0))
        figure.blocks(folder / "blocks.png", title, steps, count)
        drawn.append("blocks")
    return drawn


def _results(summary: Mapping[str, Any], splits: Evaluations) -> list[str]:
    """The table of results: before training, dev-selected, last and best, each labelled."""
    values = {split: {point["step"]: point for point in splits[split]} for split in SPLITS}
    selected, last = summary["selected_step"], max((*values["dev"], *values["test"]), default=0)

    def row(label: str, step: int) -> str:
        return f"| {label} | " + " | ".join(_percent(values[split].get(step)) for split in SPLITS) + " |"

    counts = [f"{split} (n = {splits[split][-1]['n']:,})" if splits[split] else split for split in SPLITS]
    name = worded(summary["metric"], 1.0).partition(" ")[0]
    lines = [f"| {name} | {counts[0]} | {counts[1]} |", "|---|---|---|"]
    if last == 0:
        return [*lines, row("without training", 0)]
    if 0 in values["dev"] or 0 in values["test"]:
        lines.append(row("before training", 0))
    lines.append(row(f"**selected by {summary['selected_by']}**: step {selected:,}", selected))
    if last != selected:
        lines.append(row(f"last step: {last:,}", last))
    test = summary["test"]
    if test.get("best") is not None:
        lines.append(
            "| best of the evaluations, as the paper reports; it looks at test | | "
            f"{worded(summary['metric'], test['best'], ' %').partition(' ')[2]} |"
        )
    return lines


def _percent(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return "–"
    exact = point.get("exact_match")
    value = worded(point["metric"], point["value"], " %").partition(" ")[2]
    return value + ("" if exact is None else f" (exact match {100 * exact:.1f} %)")


def _facts(folder: Path, config: Config, summary: Mapping[str, Any], steps: Steps) -> list[str]:
    """Settings, time and memory, and where to find the rest."""
    lines = []
    if config.trains:
        settings = f"lr {config.lr:g}, batch {config.batch_size * config.accumulate}, seed {config.seed}"
        if config.data_seed != config.seed:
            settings += f", data seed {config.data_seed}"
        lines.append(f"- {summary['steps']:,} steps: {settings}; all settings are in [config.toml](config.toml)")
    if summary.get("skipped"):
        lines.append(f"- steps that changed nothing, because their loss was not finite: {summary['skipped']:,}")
    lines.append(f"- {summary['seconds']:,.1f} seconds in all")
    if summary.get("peak_memory"):
        lines.append(f"- peak memory {summary['peak_memory'] / 2**30:.2f} GiB")
    if (folder / "journal.zbj").is_file():
        size = (folder / "journal.zbj").stat().st_size
        lines.append(
            f"- [journal.zbj](journal.zbj), {size:,} bytes: with the base weights it gives the weights at any step"
        )
    files = ["metrics.jsonl", *(["steps.csv"] if len(steps["step"]) else [])]
    lines.append(f"- numbers: {', '.join(f'[{name}]({name})' for name in files)}, [summary.json](summary.json)")
    return lines
