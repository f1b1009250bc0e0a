"""The figure of a race: dev metric and loss, against seconds and against forward passes."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import atomic
from .plan import AUTO
from .score import Score, band

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The palette of Okabe and Ito without its yellow, which is too pale for a line."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
BAND_ALPHA, CLEAR_BANDS = 0.15, 4
"""The opacity of a band, and the number of bands that may overlap before they are drawn lighter."""
LEGEND_COLUMNS, ROW_INCHES = 5, 0.18
SIZE_INCHES = (8.4, 5.6)
LOSS_MARGIN = 1.25
"""Losses above the loss before training times this factor lie outside the figure."""


def draw(folder: Path, title: str, scores: Mapping[str, Sequence[Score]]) -> list[Path]:
    """Draw ``race.svg`` and ``race.png``; nothing if no runner has two evaluations, or without matplotlib.

    Args:
        folder: the folder to write to.
        title: the title above the panels.
        scores: the scores by entrant, in the order of the legend.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        return []
    from matplotlib.figure import Figure

    from ..report.figure import STYLE

    ran = {name: some for name, some in scores.items() if band(some, "seconds", "dev") is not None}
    if not ran:
        return []
    metric = next(iter(ran.values()))[0].dev_metric
    with mpl.rc_context(STYLE | {"svg.hashsalt": "zeroblock", "svg.fonttype": "path"}):  # type: ignore[arg-type]
        width, height = SIZE_INCHES
        rows = -(-len(ran) // LEGEND_COLUMNS)
        figure = Figure(figsize=(width, height + ROW_INCHES * (rows - 1)), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        panels = figure.subplots(2, 2, sharex="col", sharey="row")
        for row, of in enumerate(("dev", "loss")):
            for column, against in enumerate(("seconds", "forwards")):
                _panel(panels[row][column], ran, against, of)
        panels[0][0].set_ylabel(f"dev {metric} (%)")
        panels[1][0].set_ylabel("dev loss (nats)")
        panels[1][0].set_xlabel("seconds of training")
        panels[1][1].set_xlabel("forward passes")
        panels[1][1].xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        _bound(panels[1][0], ran)
        figure.align_ylabels()
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), LEGEND_COLUMNS))
        paths = [folder / "race.svg", folder / "race.png"]
        for path in paths:
            picture = io.BytesIO()
            # a date would make equal figures differ
            figure.savefig(picture, format=path.suffix[1:], metadata={"Date": None} if path.suffix == ".svg" else None)
            atomic.write(path, picture.getvalue())
    return paths


def _panel(axes: Any, scores: Mapping[str, Sequence[Score]], against: str, of: str) -> None:
    """Draw a mean per entrant, with a band of one standard deviation where there are several seeds.

    A method has one colour; its line is dashed if no learning rate was set.
    """
    scale = 100.0 if of == "dev" else 1.0
    plain = list(dict.fromkeys(name.removesuffix(f" {AUTO}") for name in scores))
    for name, some in scores.items():
        curve = band(some, against, of)
        if curve is None:
            continue
        number = plain.index(name.removesuffix(f" {AUTO}"))
        colour = COLOURS[number % len(COLOURS)]
        marker = MARKERS[(number + number // len(COLOURS)) % len(MARKERS)]  # changes when the colours repeat
        line = "--" if name.endswith(f" {AUTO}") else "-"
        mean, spread = scale * curve.mean, scale * curve.spread
        axes.plot(curve.x, mean, color=colour, marker=marker, linestyle=line, label=name)
        if spread.any():
            alpha = BAND_ALPHA * min(1.0, CLEAR_BANDS / len(scores))
            axes.fill_between(curve.x, mean - spread, mean + spread, color=colour, alpha=alpha, linewidth=0)
    axes.margins(x=0.02)


def _bound(axes: Any, scores: Mapping[str, Sequence[Score]]) -> None:
    """Keep a runner that diverged from flattening the others."""
    losses = [point.loss for some in scores.values() for one in some for point in one.points]
    finite = [loss for loss in losses if math.isfinite(loss)]
    start = max((one.points[0].loss for some in scores.values() for one in some if one.points), default=math.nan)
    if finite and math.isfinite(start) and max(finite) > LOSS_MARGIN * start:
        low = min(finite)
        axes.set_ylim(low - 0.05 * (LOSS_MARGIN * start - low), LOSS_MARGIN * start)
