"""The figures of a run: its loss, its metric, and which blocks it moved over time."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from .. import atomic

Series = Sequence[Mapping[str, Any]]
"""Evaluations, each with ``step``, ``value`` and ``loss``."""

BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#666666"
"""Two colours of Okabe and Ito, and a grey: distinct under every common colour blindness."""

SPLITS = {"dev": (BLUE, "o", "-"), "test": (ORANGE, "s", "--")}
"""Colour, marker and line of a split: distinct in black and white too."""

STYLE: dict[str, Any] = {
    "savefig.dpi": 200,
    "text.parse_math": False,  # a dollar sign in the name of a metric is no formula
    "font.size": 9,
    "axes.titlesize": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.3,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
}

SIZE_INCHES = (4.8, 3.0)
"""Width and height: 960 by 600 pixels, half the width of the README."""

MIN_COLUMNS, MAX_COLUMNS, VISITS_PER_COLUMN = 12, 60, 10
"""Columns of the heat map: a block is visited about ten times per column, because fewer visits would show noise."""

MAX_POINTS = 200
"""Maximum points of a smoothed curve."""


def loss(path: Path, title: str, steps: Mapping[str, NDArray[Any]], dev: Series) -> None:
    """Draw the training loss, every step and smoothed, with the dev loss of each evaluation.

    Args:
        path: the PNG file.
        title: the text above the axes.
        steps: the columns ``step`` and ``loss``, (n,) each; empty for a run without training steps.
        dev: evaluations on dev.
    """
    with _sheet(path, title) as axes:
        if len(steps["step"]):
            axes.plot(steps["step"], steps["loss"], color=GREY, alpha=0.22, linewidth=0.6)
            x, y, width = _smooth(steps["step"], steps["loss"])
            axes.plot(x, y, color=GREY, label=f"train (median of {width} steps)" if width > 1 else "train")
            axes.set_ylim(*_view(steps["loss"], [point["loss"] for point in dev]))
        if dev:
            colour, marker, line = SPLITS["dev"]
            at, value = [point["step"] for point in dev], [point["loss"] for point in dev]
            axes.plot(at, value, color=colour, marker=marker, linestyle=line, label="dev")
        axes.set_ylabel("loss (nats)")
        _steps(axes)
        axes.legend()


def metric(path: Path, title: str, name: str, splits: Mapping[str, Series], selected: tuple[int, str]) -> None:
    """Draw the metric of every evaluation on dev and test.

    Args:
        path: the PNG file.
        title: the text above the axes.
        name: the name of the metric.
        splits: evaluations on ``dev`` and ``test``.
        selected: the step that dev selected, and the criterion.
    """
    with _sheet(path, title) as axes:
        for split, points in splits.items():
            colour, marker, line = SPLITS[split]
            x, y = [point["step"] for point in points], [100 * point["value"] for point in points]
            axes.plot(x, y, color=colour, marker=marker, linestyle=line, label=split)
        step, by = selected
        axes.axvline(step, color=GREY, linewidth=0.8, linestyle=":", label=f"selected by {by}", zorder=0)
        axes.set_ylabel(f"{name} (%)")
        _steps(axes)
        axes.legend()


def blocks(path: Path, title: str, steps: Mapping[str, NDArray[Any]], count: int) -> None:
    """Draw how often each block was moved, over time.

    Args:
        path: the PNG file.
        title: the text above the axes.
        steps: the columns ``step`` and ``block``, (n,) each.
        count: the number of blocks.
    """
    first, last = int(steps["step"].min()), int(steps["step"].max()) + 1
    bins = min(max((last - first) // (VISITS_PER_COLUMN * count), MIN_COLUMNS), MAX_COLUMNS, last - first)
    edges = np.linspace(first, last, bins + 1)
    rows = np.arange(count + 1) - 0.5
    chosen, _, _ = np.histogram2d(steps["block"], steps["step"], bins=(rows, edges))
    total = chosen.sum(axis=0, keepdims=True)
    share = 100 * np.divide(chosen, total, out=np.zeros_like(chosen), where=total > 0)
    height = min(6.0, max(SIZE_INCHES[1], 0.11 * count + 1))
    with _sheet(path, title, (SIZE_INCHES[0], height)) as axes:
        axes.grid(False)
        image = axes.pcolormesh(edges, rows, share, cmap="viridis", vmin=0)
        axes.set_ylabel("block (0 is nearest to the input)")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        _steps(axes)
        bar = axes.figure.colorbar(image, ax=axes, pad=0.02)
        bar.set_label("steps on the block (%)")
        bar.outline.set_visible(False)  # type: ignore[operator]


@contextmanager
def _sheet(path: Path, title: str, size: tuple[float, float] = SIZE_INCHES) -> Iterator[Axes]:
    """Yield axes in the common style, and save them at the end; without pyplot no figure is shown or kept open."""
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        axes.set_title(title, loc="left")
        yield axes
        atomic.make_folder(path.parent)
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
        atomic.write(path, picture.getvalue())


def _steps(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))


def _smooth(x: NDArray[Any], y: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], int]:
    """Medians in windows of a fiftieth of the run, at least ten steps, and the windows' width.

    A spike does not move a median.

    Args:
        x: steps, (n,).
        y: losses, (n,); values that are not finite are left out.
    """
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    width = max(1, min(10, len(y) // 4), len(y) // 50)
    starts = np.unique(np.linspace(0, len(y) - width, min(len(y), MAX_POINTS)).astype(int))
    middles = np.array([x[start : start + width].mean() for start in starts])
    return middles, np.array([np.median(y[start : start + width]) for start in starts]), width


def _view(values: NDArray[Any], more: Sequence[float]) -> tuple[float, float]:
    """A range that shows all but the extreme hundredth, so that a spike does not flatten the curve."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return 0.0, 1.0
    shown = [*np.quantile(finite, [0.005, 0.995]), *(value for value in more if np.isfinite(value))]
    low, high = min(shown), max(shown)
    margin = 0.06 * (high - low) or 0.5
    return low - margin, high + margin
