"""Charts as inline SVG: a line chart over steps, and the activity of blocks over steps.

Each chart carries its numbers in a ``data-`` attribute, from which ``html.js`` shows the values under the pointer.
Colours are classes of ``html.css``, so that the same chart serves a light and a dark page.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 36
"""Margins of a line chart, for its ticks."""
MAX_POINTS = 300
"""Maximum points of a line; more are grouped into medians, with a band from the 5 % to the 95 % quantile."""
MAX_COLUMNS, MAX_ROWS = 90, 96
"""Maximum cells of the chart of blocks; more steps or blocks share a cell."""
LEVELS = 6
"""Shades of a cell."""


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Args:
        label: the text in the legend.
        style: a class of ``html.css``.
        x: steps, (n,).
        y: values, (n,); those that are not finite are left out.
        marked: whether every point has a dot.
    """

    label: str
    style: str
    x: Sequence[float] | NDArray[Any]
    y: Sequence[float] | NDArray[Any]
    marked: bool = False


@dataclass(frozen=True)
class Level:
    """A horizontal line, such as the result before training, or a vertical one at a step.

    Args:
        label: the text in the legend.
        style: a class of ``html.css``.
        at: the value, or the step.
        vertical: whether the line is vertical, at a step.
    """

    label: str
    style: str
    at: float
    vertical: bool = False


def text(value: object) -> str:
    """Escape text for HTML, so that nothing in it is markup."""
    return html.escape(str(value), quote=True)


def attribute(data: Any) -> str:
    """Encode data for the script as the value of an attribute."""
    return text(json.dumps(data, separators=(",", ":"), allow_nan=False))


def number(value: float) -> str:
    """Format a number for display, with about four digits.

    >>> number(1234567.0), number(0.000123), number(0.5), number(12)
    ('1,234,567', '1.23e-4', '0.5', '12')
    """
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "–"
    if abs(value) >= 1e4 and abs(value) < 1e15:
        return f"{value:,.0f}"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    digits, _, exponent = f"{value:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers within a range.

    >>> ticks(0.0, 1.0), ticks(3, 31, 4)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [10.0, 20.0, 30.0])
    """
    raw = (high - low) / max(1, count)
    if not raw > 0 or not math.isfinite(raw):
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def gathered(x: NDArray[Any], y: NDArray[Any], points: int = MAX_POINTS) -> tuple[NDArray[Any], NDArray[Any]]:
    """Group values into at most ``points``: steps, (n,), and the 5 %, 50 % and 95 % quantiles at each, (n, 3)."""
    keep = np.isfinite(y)
    x, y = np.asarray(x)[keep], np.asarray(y, dtype=float)[keep]
    if len(x) <= points:
        return x, np.stack([y, y, y], axis=1) if len(y) else np.empty((0, 3))
    parts = np.array_split(np.arange(len(x)), points)
    return np.array([x[part].mean() for part in parts]), np.array(
        [np.quantile(y[part], (0.05, 0.5, 0.95)) for part in parts]
    )


def view(values: Iterable[float], certain: Iterable[float] = ()) -> tuple[float, float]:
    """A range that shows all but the extreme hundredth of some values, so that a spike does not flatten the curve.

    Args:
        values: values of noisy lines.
        certain: values that are always shown.
    """
    finite = np.array([value for value in values if math.isfinite(value)])
    inside = [*(np.quantile(finite, [0.005, 0.995]) if len(finite) else ()), *(v for v in certain if math.isfinite(v))]
    if not inside:
        return 0.0, 1.0
    low, high = float(min(inside)), float(max(inside))
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 0.5
    return low - margin, high + margin


def line_chart(
    name: str, lines: Sequence[Line], levels: Sequence[Level] = (), *, unit: str = "", noisy: Sequence[str] = ()
) -> str:
    """Draw lines over steps, with a legend.

    Args:
        name: the name of the chart, for screen readers.
        lines: the lines, at least one of them with a point.
        levels: horizontal and vertical lines across the chart.
        unit: the text after every value of the y axis, such as ``%``.
        noisy: styles of the lines whose extremes may lie outside the chart.
    """
    xs = [float(value) for line in lines for value in line.x]
    low_x, high_x = (min(xs), max(xs)) if xs else (0.0, 1.0)
    if low_x == high_x:
        low_x, high_x = low_x - 0.5, high_x + 0.5
    rough = [float(v) for line in lines if line.style in noisy for v in line.y]
    sure = [float(v) for line in lines if line.style not in noisy for v in line.y]
    low, high = view(rough, [*sure, *(level.at for level in levels if not level.vertical)])

    def px(value: float) -> float:
        return LEFT + (value - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)

    def py(value: float) -> float:
        inside = min(max(value, low - (high - low)), high + (high - low))
        return TOP + (high - inside) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [_frame(ticks(low, high), ticks(low_x, high_x), px, py, unit)]
    for level in levels:
        at = px(level.at) if level.vertical else py(level.at)
        where = f"M{at:.1f} {TOP}V{HEIGHT - BOTTOM}" if level.vertical else f"M{LEFT} {at:.1f}H{WIDTH - RIGHT}"
        parts.append(f'<path class="level {level.style}" d="{where}"/>')
    data = []
    for line in lines:
        x, y = gathered(np.asarray(line.x), np.asarray(line.y))
        if not len(x):
            continue
        if len(x) < len(line.x) and not line.marked:
            around = [(a, b) for a, b in zip(x, y[:, 2], strict=True)]
            around += [(a, b) for a, b in zip(x[::-1], y[::-1, 0], strict=True)]
            parts.append(f'<path class="band {line.style}" d="{_path(around, px, py)}Z"/>')
        parts.append(f'<path class="line {line.style}" d="{_path(list(zip(x, y[:, 1], strict=True)), px, py)}"/>')
        if line.marked:
            parts += [
                f'<circle class="dot {line.style}" cx="{px(a):.1f}" cy="{py(b):.1f}" r="4"/>'
                for a, b in zip(x, y[:, 1], strict=True)
            ]
        data.append(
            {"label": line.label, "style": line.style}
            | {"x": [float(f"{v:.6g}") for v in x], "y": [float(f"{v:.5g}") for v in y[:, 1]]}
        )
    chart = {"x": [low_x, high_x], "box": [LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM], "unit": unit, "lines": data}
    keys = [(line.style, line.label, "") for line in lines] + [(one.style, one.label, " level") for one in levels]
    return (
        f'<div class="legend">{"".join(_key(*key) for key in keys)}</div>'
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(name)}" '
        f'data-lines="{attribute(chart)}"><clipPath id="clip-{text(name)}"><rect x="{LEFT - 6}" y="{TOP - 4}" '
        f'width="{WIDTH - LEFT - RIGHT + 12}" height="{HEIGHT - TOP - BOTTOM + 8}"/></clipPath>{parts[0]}'
        f'<g clip-path="url(#clip-{text(name)})">{"".join(parts[1:])}</g>'
        f'<path class="cursor" d="M0 {TOP}V{HEIGHT - BOTTOM}" visibility="hidden"/></svg>'
    )


def _key(style: str, label: str, more: str) -> str:
    return f'<span class="key"><i class="{style}{more}"></i>{text(label)}</span>'


def _frame(y_ticks: list[float], x_ticks: list[float], px: Any, py: Any, unit: str) -> str:
    lines = "".join(f"M{LEFT} {py(v):.1f}H{WIDTH - RIGHT}" for v in y_ticks)
    labels = [
        f'<text x="{LEFT - 7}" y="{py(v) + 4:.1f}" text-anchor="end">{text(number(v))}{text(unit)}</text>'
        for v in y_ticks
    ]
    whole = [v for v in x_ticks if v == int(v)]
    labels += [f'<text x="{px(v):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{v:,.0f}</text>' for v in whole]
    return f'<path class="grid" d="{lines}"/><g class="ticks">{"".join(labels)}</g>'


def _path(points: list[tuple[float, float]], px: Any, py: Any) -> str:
    return "M" + "L".join(f"{px(x):.1f} {py(y):.1f}" for x, y in points)


def activity_chart(name: str, steps: NDArray[Any], block: NDArray[Any], coeff: NDArray[Any], names: list[str]) -> str:
    """Draw which blocks were active when: a row per block, darker where its coefficients were larger.

    Args:
        name: the name of the chart.
        steps: numbers of the steps, (n,).
        block: the active block of each step, (n,).
        coeff: the coefficient of each step, (n,).
        names: the names of the blocks, from input to output.
    """
    group = -(-len(names) // MAX_ROWS)
    labels = [
        names[i] if group == 1 else f"{names[i]} … {names[min(i + group, len(names)) - 1]}"
        for i in range(0, len(names), group)
    ]
    first, last = int(steps.min()), int(steps.max()) + 1
    columns = min(MAX_COLUMNS, last - first)
    row, column = block // group, (steps - first) * columns // (last - first)
    visits = np.zeros((len(labels), columns), dtype=int)
    np.add.at(visits, (row, column), 1)
    known = np.isfinite(coeff)
    squares, counts = np.zeros(visits.shape), np.zeros(visits.shape, dtype=int)
    np.add.at(squares, (row[known], column[known]), coeff[known].astype(float) ** 2)
    np.add.at(counts, (row[known], column[known]), 1)
    size = np.sqrt(squares / np.maximum(counts, 1))
    top = float(np.quantile(size[counts > 0], 0.95)) if counts.any() else 0.0
    width, height, left = 1060, max(8, min(18, 640 // len(labels))), 150
    cell = (width - left - 8) / columns
    shades: list[list[str]] = [[] for _ in range(LEVELS)]
    cells = []
    for r, c in zip(*np.nonzero(visits), strict=True):
        shade = min(LEVELS - 1, int(LEVELS * size[r, c] / top)) if top else LEVELS - 1
        wide = max(1.0, cell - 0.6)
        shades[shade].append(f"M{left + c * cell:.1f} {r * height + 1}h{wide:.1f}v{height - 2}h-{wide:.1f}z")
        rms = float(f"{size[r, c]:.3g}") if counts[r, c] else None
        cells.append([int(r), int(c), int(visits[r, c]), rms])
    every = max(1, -(-14 // height))  # skip labels of low rows, which would touch each other
    bottom = len(labels) * height
    shown = [
        f'<text x="{left - 8}" y="{r * height + height / 2 + 4:.1f}" text-anchor="end">'
        f"{text(_short(label, names))}</text>"
        for r, label in enumerate(labels)
        if r % every == 0
    ]
    shown += [
        f'<text x="{left + (v - first) / (last - first) * (width - left - 8):.1f}" y="{bottom + 18}" '
        f'text-anchor="middle">{v:,.0f}</text>'
        for v in ticks(first, last, 8)
        if v == int(v)
    ]
    drawn = [
        f'<path class="cell" fill-opacity="{(i + 1) / LEVELS:.2f}" d="{"".join(paths)}"/>'
        for i, paths in enumerate(shades)
        if paths
    ]
    edges = [first + -(-c * (last - first) // columns) for c in range(columns + 1)]
    data = {"rows": labels, "edges": edges, "cells": cells, "box": [left, width - 8, height, cell]}
    return (
        f'<div class="scroll"><svg class="chart wide" viewBox="0 0 {width} {bottom + 26}" role="img" '
        f'aria-label="{text(name)}" data-cells="{attribute(data)}">'
        f'<rect class="field" x="{left}" y="0" width="{width - left - 8}" height="{bottom}"/>'
        f"{''.join(drawn)}"
        f'<g class="ticks">{"".join(shown)}</g></svg></div>'
    )


def _short(label: str, names: list[str]) -> str:
    """A block's name without the prefix that most names share, for a narrow margin.

    >>> _short("model.layers.12", ["model.embed_tokens", "model.layers.12", "lm_head"])
    'layers.12'
    """
    for prefix in ("model.decoder.", "transformer.", "model."):
        if sum(name.startswith(prefix) for name in names) * 2 > len(names):
            label = " ".join(word.removeprefix(prefix) for word in label.split(" "))
            break
    return label if len(label) <= 24 else f"{label[:11]}…{label[-12:]}"
