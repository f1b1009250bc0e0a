"""How every figure looks: column width, colour-blind-safe, the same colour for the same projection everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

COLUMN = 3.4
"""Inches of a column."""

WIDE = 7.0
"""Inches of a page."""

COLOURS = {"low-rank": "#0072B2", "sparse": "#E69F00", "sparse (Bernoulli)": "#E69F00", "block-sparse": "#009E73"}
"""Okabe and Ito's blue, orange and green: told apart under every common colour blindness."""

MARKERS = {"low-rank": "o", "sparse": "s", "sparse (Bernoulli)": "s", "block-sparse": "D"}

BOUND = "#D55E00"
"""Vermilion: what a theorem says."""

MEASURED = "#0072B2"

GREY = "#666666"

STYLE: dict[str, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 300,
    "figure.constrained_layout.use": True,
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 6.5,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.2,
    "axes.grid": True,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.3,
    "pdf.fonttype": 42,  # text stays text
}


@contextmanager
def style() -> Iterator[None]:
    """Draw in the house style, leaving the caller's settings alone."""
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        yield


def sequence(count: int) -> list[Any]:
    """Colours of an ordered family, dark to light, its palest left out so that lines stay visible."""
    return [mpl.colormaps["viridis"](x) for x in np.linspace(0.0, 0.85, count)]


def sheet(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure and its axes, without pyplot: nothing is shown, nothing is kept."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def band(axes: Axes, x: Any, rows: Any, colour: Any, label: str | None = None, **line: Any) -> None:
    """The mean over seeds, (n, len(x)), with a band of one standard deviation."""
    rows = np.asarray(rows, dtype=float)
    mean, spread = rows.mean(0), rows.std(0)
    axes.plot(x, mean, color=colour, label=label, **line)
    if len(rows) > 1:
        low = mean - spread
        if axes.get_yscale() == "log":  # a band that reaches zero has no bottom there
            low = np.maximum(low, rows.min(0))
        axes.fill_between(x, low, mean + spread, color=colour, alpha=0.2, linewidth=0)


def panels(axes: Sequence[Axes], start: str = "a") -> None:
    """Letters in the upper left corners."""
    for i, one in enumerate(axes):
        one.set_title(f"({chr(ord(start) + i)})", loc="left", fontweight="bold")


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """``name.png`` and ``name.pdf`` in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in ("png", "pdf")]
    for path in paths:
        # a date in the PDF would make equal figures differ
        figure.savefig(path, metadata={"CreationDate": None} if path.suffix == ".pdf" else None)
    return paths


def table(frame: DataFrame, folder: Path, name: str) -> Path:
    """``name.csv`` in a folder, numbers to six digits."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.csv"
    frame.to_csv(path, index=False, float_format="%.6g", lineterminator="\n")
    return path
