"""Draw the picture of the README from measured numbers: memory and time, compared with Adam and MeZO.

    python bench/picture.py             # writes docs/images/picture-light.png and picture-dark.png

Peaks and times of MeZO's own procedure and of ``mezo_bcd`` are the latest rows of ``results/bench.csv``.
Adam with backpropagation was not run at this size.  Its bar is arithmetic on the parameters that
``zeroblock bench memory`` counts: weights, gradients and two moments, all in 16 bits, without activations.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from zeroblock.bench.memory import table
from zeroblock.bench.row import BenchRow, latest, read
from zeroblock.model import skeleton

MODEL = "opt-13b"
TASKS = ("sst2", "boolq")
NAMES = {"mezo-reference": "MeZO as published", "mezo_bcd": "zeroblock, mezo_bcd"}
ADAM = "Adam, backpropagation"
BYTES = 2
"""Bytes of a weight in fp16."""
INK = {"light": "#24292f", "dark": "#e6edf3"}
COLOURS = {ADAM: "#D55E00", "mezo-reference": "#0072B2", "mezo_bcd": "#009E73"}
"""Okabe and Ito's colours, which people with any common colour blindness can tell apart."""


def adam_bytes() -> int:
    """Bytes of the weights, their gradients and Adam's two moments, in the dtype of the weights."""
    need = {need.method: need for need in table(skeleton(MODEL), BYTES)}["mezo_adam"]
    return (2 * need.weights + need.kept) * BYTES


def measured(path: Path) -> dict[tuple[str, str], BenchRow]:
    """The latest rows on a GPU, by method and task."""
    rows = [row for row in latest(read(path, BenchRow)) if row.model == MODEL and row.device == "cuda"]
    return {(row.method, row.task): row for row in rows if row.method in NAMES and row.task in TASKS}


def draw(rows: dict[tuple[str, str], BenchRow], ink: str) -> Any:
    """Two panels of bars, memory and time, with a group per method and a bar per task."""
    from zeroblock.lab.figure import sheet

    figure, (memory, time) = sheet(9.0, 2.7, 1, 2, width_ratios=(1.1, 1), sharey=True)
    adam = adam_bytes() / 1e9
    memory.barh(0, adam, 0.34, color=COLOURS[ADAM], alpha=0.45)
    memory.barh(0, adam, 0.34, color="none", edgecolor=COLOURS[ADAM], linestyle=(0, (4, 2)), linewidth=1.2)
    memory.annotate(
        f"{adam:.0f} GB before activations (theory)", (adam, 0), xytext=(-6, 0), textcoords="offset points",
        ha="right", va="center", fontsize=8.5, color=ink,
    )  # fmt: skip
    _label(time, 0, 0, "not measured", ink)
    for place, method in enumerate(NAMES, start=1):
        for half, task in enumerate(TASKS):
            y, row = place + 0.36 * half - 0.18, rows[method, task]
            peak = (row.peak_bytes or 0) / 1e9
            ratio = "" if row.engine == "reference" else f", {row.ratio_to_reference:.0f} times as fast"
            for axis, x, text in (
                (memory, peak, f"{peak:.1f} GB, {task}"),
                (time, row.mean_ms, f"{row.mean_ms:,.0f} ms, {task}{ratio}"),
            ):
                axis.barh(y, x, 0.31, color=COLOURS[method], alpha=0.62 if half else 1.0)
                _label(axis, y, x, text, ink)
    weights = rows["mezo_bcd", "sst2"].weights_bytes / 1e9
    memory.axvline(weights, color=ink, linewidth=0.9, linestyle=(0, (2, 2)))
    memory.set_yticks(range(1 + len(NAMES)), [ADAM, *NAMES.values()])
    memory.set_ylim(len(NAMES) + 0.45, -0.3)
    memory.set_title(f"Peak memory (dotted: the weights, {weights:.1f} GB)", loc="left", color=ink, fontsize=9.5)
    time.set_title("Time per step", loc="left", color=ink, fontsize=9.5)
    time.set_xlim(0, 1.42 * time.dataLim.xmax)
    for axis in (memory, time):
        axis.set_xticks([])
        axis.tick_params(length=0, colors=ink, labelsize=9.5)
        axis.spines[:].set_visible(False)
    some = rows["mezo_bcd", "sst2"]
    where = f"OPT-13B, {some.dtype.replace('float', 'fp')}, batch {some.batch_size}, one {some.machine}"
    figure.supxlabel(where, fontsize=8, color=ink)
    return figure


def _label(axis: Any, y: float, x: float, text: str, ink: str) -> None:
    """Write a text next to the end of a bar."""
    axis.annotate(
        text, (x, y), xytext=(5, 0), textcoords="offset points", ha="left", va="center", fontsize=8.5, color=ink
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=Path("results/bench.csv"))
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    rows = measured(arguments.csv)
    for name, ink in INK.items():
        path = arguments.out / f"picture-{name}.png"
        draw(rows, ink).savefig(path, dpi=150, transparent=True)
        print(path)


if __name__ == "__main__":
    main()
