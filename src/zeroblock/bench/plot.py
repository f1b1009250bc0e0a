"""The paper's two figures, drawn from measurements: time per step by method, memory by task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import ZeroBlockError
from .row import BenchRow

COLOURS = {
    "mezo": "#0072B2",
    "sparse_mezo": "#E69F00",
    "lozo": "#CC79A7",
    "mezo_bcd": "#009E73",
}
"""The palette of Okabe and Ito, which people with any common colour blindness can tell apart."""
GREY = "#555555"
OTHERS = ("#56B4E9", "#D55E00", "#F0E442", "#000000")
HATCHES = {"reference": "", "sequential": "////", "forked": ""}
TINTS = {"reference": 0.35, "sequential": 0.75, "forked": 1.0}
ENGINES = {"reference": "as published", "sequential": "zeroblock, sequential", "forked": "zeroblock, forked"}
WIDTH_INCHES = 7.0


def draw(rows: Sequence[BenchRow], folder: Path) -> list[Path]:
    """Draw both figures as PNG and PDF; the one of memory only if peaks were measured.

    Args:
        rows: the latest measurement of each variant.
        folder: the folder for the files.
    """
    if not rows:
        raise ZeroBlockError("there are no rows to draw; measure some with: zeroblock bench step --csv FILE")
    from ..lab.figure import save, style

    with style():
        paths = save(time_figure(rows), folder, "bench_time")
        if any(row.peak_bytes is not None for row in rows):
            paths += save(memory_figure(rows), folder, "bench_memory")
    return paths


def time_figure(rows: Sequence[BenchRow]) -> Any:
    """A panel per model, a group per task: the mean step of every variant, with its ratio to MeZO as published."""

    def finish(axis: Any, members: list[BenchRow]) -> None:
        axis.set_yscale("log")
        low, high = min(r.q20_ms for r in members), max(max(r.mean_ms, r.q80_ms) for r in members)
        # a log axis has no zero for bars to start from; starting at half the shortest keeps every bar visible
        axis.set_ylim(low / 2, high * (high / low) ** 0.2 * 1.3)
        axis.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
        axis.set_ylabel("ms per step, log scale")
        if any(row.ratio_to_reference is not None for row in members):
            axis.set_title("×: times as fast as MeZO as published", loc="right", fontsize=6.5)

    def whisker(axis: Any, x: float, row: BenchRow) -> float:
        axis.plot([x, x], [row.q20_ms, row.q80_ms], color="black", linewidth=0.8, solid_capstyle="butt")
        return row.q80_ms

    def label(row: BenchRow) -> str:
        return f"{_short(row.mean_ms)} ms" if row.ratio_to_reference is None else f"×{_short(row.ratio_to_reference)}"

    return _figure(rows, lambda row: row.mean_ms, label, whisker, finish)


def memory_figure(rows: Sequence[BenchRow]) -> Any:
    """A panel per model, a group per task: the peak of every variant, and the weights as a line."""

    def value(row: BenchRow) -> float:
        return (row.peak_bytes or 0) / 1e9

    def finish(axis: Any, members: list[BenchRow]) -> None:
        weights = members[0].weights_bytes / 1e9
        axis.axhline(weights, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
        axis.annotate(
            f"weights\n{_short(weights)} GB",
            (1.0, weights),
            xycoords=("axes fraction", "data"),
            xytext=(-2, -3),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=6.5,
        )
        left, right = axis.get_xlim()
        axis.set_xlim(left, right + 0.1 * (right - left))  # room for the label of the line
        axis.margins(y=0.18)
        axis.set_ylabel("peak memory, GB")

    measured = [row for row in rows if row.peak_bytes is not None]
    return _figure(measured, value, lambda row: _short(value(row)), lambda axis, x, row: 0.0, finish)


def _figure(
    rows: Sequence[BenchRow],
    value: Callable[[BenchRow], float],
    label: Callable[[BenchRow], str],
    mark: Callable[[Any, float, BenchRow], float],
    finish: Callable[[Any, list[BenchRow]], None],
) -> Any:
    """A panel per model with a group of bars per task.

    Args:
        rows: the measurements to draw.
        value: gives the height of a bar.
        label: gives the text over it.
        mark: draws anything else that belongs to a bar at its x, and returns how high that reaches.
        finish: sets up the axis of a panel.
    """
    from ..lab.figure import sheet

    panels: dict[tuple[str, str, str, int], list[BenchRow]] = {}
    for row in rows:
        panels.setdefault((row.machine, row.model, row.dtype, row.batch_size), []).append(row)
    figure, axes = sheet(WIDTH_INCHES, 2.3 * len(panels) + 0.3, len(panels), 1, squeeze=False)
    for axis, members in zip(axes.flat, panels.values(), strict=True):
        tasks = list(dict.fromkeys(row.task for row in members))
        kinds = list(dict.fromkeys((row.method, row.engine) for row in _ordered(members)))
        width = 0.84 / len(kinds)
        for row in members:
            place = kinds.index((row.method, row.engine))
            x = tasks.index(row.task) + (place + 0.5) * width - 0.42
            axis.bar(x, value(row), width * 0.92, **_paint(row))
            top = max(value(row), mark(axis, x, row))
            axis.annotate(
                label(row),
                (x, top),
                xytext=(0, 2.5),
                textcoords="offset points",
                ha="center",
                fontsize=6,
                fontweight="bold" if row.engine == "forked" else "normal",
                rotation=90 if len(tasks) * len(kinds) > 14 else 0,
            )
        axis.set_xlim(-0.5, len(tasks) - 0.5)
        axis.set_xticks(range(len(tasks)), tasks)
        axis.grid(axis="x", visible=False)
        axis.set_title(f"{_pretty(members[0].model)} ({_where(members[0])})", loc="left")
        finish(axis, members)
    _legend(figure, rows)
    return figure


def _paint(row: BenchRow) -> dict[str, Any]:
    """The colour stands for the method, tint and hatching for the engine."""
    return _shade(_colour(row), row.engine)


def _shade(colour: str, engine: str) -> dict[str, Any]:
    from matplotlib.colors import to_rgb

    base, tint = to_rgb(colour), TINTS[engine]
    face = tuple(1 - tint * (1 - channel) for channel in base)
    return {"facecolor": face, "hatch": HATCHES[engine], "edgecolor": base, "linewidth": 0.6}


def _colour(row: BenchRow) -> str:
    method = row.method.removesuffix("-reference")
    # chosen by name, so that a method keeps its colour whatever else is drawn
    return COLOURS.get(method) or OTHERS[sum(map(ord, method)) % len(OTHERS)]


def _ordered(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Published procedures first, then ours; both in the order in which the paper names the methods."""
    methods = [*COLOURS]

    def place(row: BenchRow) -> tuple[bool, int, str, int]:
        method = row.method.removesuffix("-reference")
        rank = methods.index(method) if method in methods else len(methods)
        return row.engine != "reference", rank, method, list(ENGINES).index(row.engine)

    return sorted(rows, key=place)


def _legend(figure: Any, rows: Sequence[BenchRow]) -> None:
    from matplotlib.patches import Patch

    seen = {row.method.removesuffix("-reference"): row for row in _ordered(rows)}
    handles = [Patch(facecolor=_colour(row), label=method) for method, row in seen.items()]
    for engine in (e for e in ENGINES if any(row.engine == e for row in rows)):
        handles.append(Patch(**_shade(GREY, engine), label=ENGINES[engine]))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 7))


def _where(row: BenchRow) -> str:
    name = row.machine.removeprefix("NVIDIA ") if row.device == "cuda" else f"CPU, {row.machine.rpartition(', ')[2]}"
    return f"{name}, {row.dtype.replace('float', 'fp')}, batch {row.batch_size}"


def _pretty(model: str) -> str:
    return model.upper() if model.startswith("opt-") else Path(model).name


def _short(value: float) -> str:
    """Three digits.

    >>> _short(461.2), _short(22.34), _short(2.177), _short(9.999)
    ('461', '22.3', '2.18', '10.0')
    """
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
