"""The look of every figure: column width, colours safe for colour-blind readers, one colour per projection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator
from pandas import DataFrame

COLUMN = 3.4
"""Width of a column, in inches."""

WIDE = 7.0
"""Width of a page, in inches."""

COLOURS = {"low-rank": "#0072B2", "sparse": "#E69F00", "sparse (Bernoulli)": "#E69F00", "block-sparse": "#009E73"}
"""Okabe and Ito's blue, orange and green, which readers tell apart under every common colour blindness."""

MARKERS = {"low-rank": "o", "sparse": "s", "sparse (Bernoulli)": "s", "block-sparse": "D"}

BOUND = "#D55E00"
"""Vermilion, for the statements of theorems."""

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
    """Draw in the lab's style without changing the caller's settings."""
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        yield


def sequence(count: int) -> list[Any]:
    """Colours of an ordered family, from dark to light; the palest are left out so that lines stay visible."""
    return [mpl.colormaps["viridis"](x) for x in np.linspace(0.0, 0.85, count)]


def sheet(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """Make a figure and its axes without pyplot, which would keep a reference to them."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def plain_ticks(axis: Axis, values: Sequence[float]) -> None:
    """Label a logarithmic axis at these values, as plain numbers."""
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
    axis.set_minor_locator(NullLocator())


def panels(axes: Sequence[Axes], start: str = "a") -> None:
    """Put letters in the upper left corners, before the panels' titles."""
    for i, one in enumerate(axes):
        one.set_title(f"({chr(ord(start) + i)})", loc="left", fontweight="bold")


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write ``name.png`` and ``name.pdf`` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in ("png", "pdf")]
    for path in paths:
        # a date in the PDF would make equal figures differ
        figure.savefig(path, metadata={"CreationDate": None} if path.suffix == ".pdf" else None)
    return paths


def table(frame: DataFrame, folder: Path, name: str) -> Path:
    """Write ``name.csv`` into a folder, with numbers to six digits."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.csv"
    frame.to_csv(path, index=False, float_format="%.6g", lineterminator="\n")
    return path
