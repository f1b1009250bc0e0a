"""The page of a run: ``summary.md`` and its figures, from the files of the run folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import atomic
from ..errors import ZeroBlockError, shown
from ..evaluate.measurement import SPLITS
from ..task.metric import worded
from ..train.config import Config
from .html import REPORT
from .html_run import report
from .source import MAX_HEADING, Evaluations, Steps, read_source
from .summary import ending


def write_page(folder: Path) -> None:
    """Write ``summary.md``, ``figures/*.png`` and ``report.html`` of a run that has finished.

    Args:
        folder: the run's folder, with ``config.toml``, ``metrics.jsonl``, ``summary.json``, and ``steps.csv`` if the
            run trained.
    """
    source = read_source(folder)
    config, summary, splits, steps = source.config, source.summary, source.splits, source.steps
    if not source.finished or summary is None:
        raise ZeroBlockError(f"{folder} holds a run that has not finished: zeroblock resume {folder}")
    atomic.write(folder / REPORT, report(source))
    if importlib.util.find_spec("matplotlib") is None:
        pictures = ["No figures: they need `pip install matplotlib`."]
    else:
        pictures = [
            f"![{name}](figures/{name}.png)" for name in _draw(folder / "figures", config, summary, splits, steps)
        ]
    lines = [
        f"# {_title(config)}",
        "",
        f"    {shown(source.command, MAX_HEADING)}",
        "",
        *_results(summary, splits),
        *ending(folder, summary),
        "",
        *_facts(folder, config, summary, steps),
        *(line for picture in pictures for line in ("", picture)),
    ]
    atomic.write(folder / "summary.md", "\n".join(lines) + "\n")


def _title(config: Config) -> str:
    """The task, the method and the model; files and folders are named without their path."""
    return shown(f"{Path(config.task).stem}, {config.method}, {Path(config.model).name}")


def _draw(folder: Path, config: Config, summary: Mapping[str, Any], splits: Evaluations, steps: Steps) -> list[str]:
    """Draw the figures that the run has data for, and return their names."""
    from . import figure

    title = _title(config)
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
            "| best of the evaluations, as the paper reports: chosen by looking at test | | "
            f"{worded(summary['metric'], test['best'], ' %').partition(' ')[2]} |"
        )
    return lines


def _percent(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return "–"
    exact = point.get("exact_match")
    value = worded(point["metric"], point["value"], " %").partition(" ")[2]
    if exact is None:
        return value
    loss = point.get("loss")  # it moves long before generated answers do
    return f"{value} (exact match {100 * exact:.1f} %{'' if loss is None else f', loss {loss:.4f}'})"


def _facts(folder: Path, config: Config, summary: Mapping[str, Any], steps: Steps) -> list[str]:
    """Settings, time and memory, and links to the other files."""
    lines = []
    if config.trains:
        rate = "automatic lr" if config.lr is None else f"lr {config.lr:g}"
        settings = f"{rate}, batch {config.batch_size * config.accumulate}, seed {config.seed}"
        if config.data_seed != config.seed:
            settings += f", data seed {config.data_seed}"
        lines.append(f"- {summary['steps']:,} steps: {settings}; all settings are in [config.toml](config.toml)")
    if summary.get("skipped"):
        lines.append(f"- steps that changed nothing, because their loss was not finite: {summary['skipped']:,}")
    if isinstance(summary.get("adapter"), str):
        lines.append(f"- [adapter](adapter), as PEFT saves it: {shown(summary['adapter'], MAX_HEADING)}")
    lines.append(f"- {summary['seconds']:,.1f} seconds in all")
    if summary.get("peak_memory"):
        lines.append(f"- peak memory {summary['peak_memory'] / 2**30:.2f} GiB")
    if (folder / "journal.zbj").is_file():
        size = (folder / "journal.zbj").stat().st_size
        lines.append(
            f"- [journal.zbj](journal.zbj), {size:,} bytes: with the base weights it gives the weights at any step"
        )
    lines.append(f"- [{REPORT}]({REPORT}): the same with curves, blocks and commands, to open in a browser")
    files = ["metrics.jsonl", *(["steps.csv"] if len(steps["step"]) else [])]
    lines.append(f"- numbers: {', '.join(f'[{name}]({name})' for name in files)}, [summary.json](summary.json)")
    return lines
