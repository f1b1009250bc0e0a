"""Draw the crossing of the two bounds of a step on streamed weights, from measured rows.

    python bench/bounds.py             # reads results/stream.csv, writes docs/images/stream.svg

Copying the layers takes the same time for any batch; computing with them grows with it.  The rows are those of
``zeroblock bench stream --model opt-13b --memory 14GB --max-tokens 16384 --task sst2 --batch-size 16,64,256,1024``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from zeroblock.bench.row import read
from zeroblock.bench.stream import StreamRow

ROOT = Path(__file__).parents[1]
WHAT, MIN_SIZES = ("opt-13b", "sst2", "mezo_bcd", "float16"), 3
COLOURS = {"step": "#009E73", "copies": "#0072B2", "products": "#D55E00"}
"""Okabe and Ito's colours, which people with any common colour blindness can tell apart."""


def sizes(path: Path) -> list[StreamRow]:
    """The rows of the memory size with the most batch sizes, smallest batch first."""
    rows = [row for row in read(path, StreamRow) if (row.model, row.task, row.method, row.dtype) == WHAT]
    by_memory: dict[int, dict[int, StreamRow]] = {}
    for row in (row for row in rows if row.memory_bytes is not None):
        by_memory.setdefault(row.memory_bytes, {})[row.batch_size] = row
    found = max(by_memory.values(), key=len, default={})
    if len(found) < MIN_SIZES:
        raise SystemExit(f"{path} has no {WHAT[0]} on {WHAT[1]} at {MIN_SIZES} batch sizes: zeroblock bench stream")
    return [found[size] for size in sorted(found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=ROOT / "results" / "stream.csv")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "stream.svg")
    args = parser.parse_args()
    rows = sizes(args.csv)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from zeroblock.report.figure import STYLE

    with mpl.rc_context(STYLE | {"svg.hashsalt": "zeroblock"}):
        figure = Figure(figsize=(6.0, 3.2), layout="constrained")
        axes = figure.subplots()
        x = [row.batch_size for row in rows]
        for name, values, line in (
            ("products", [row.compute_ms for row in rows], "--"),
            ("copies", [row.copy_ms for row in rows], "--"),
            ("step", [row.step_ms for row in rows], "-"),
        ):
            label = {"step": "a step, measured", "copies": "bound: its copies", "products": "bound: its products"}[name]
            each = [value / size for value, size in zip(values, x, strict=True)]
            axes.plot(x, each, line, marker="o", color=COLOURS[name], label=label)
        axes.set(xscale="log", yscale="log", xlabel="examples per step", ylabel="ms per example")
        axes.set_xticks(x, [f"{row.batch_size:,}\n{row.tokens:,} tokens" for row in rows])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
        memory = (rows[0].memory_bytes or 0) / 1e9
        axes.set_title(f"OPT-13B streamed into {memory:.0f} GB of an {rows[0].machine}, {WHAT[1]}", loc="left")
        axes.legend(frameon=False)
        figure.savefig(args.out, metadata={"Date": None})
        print(args.out)


if __name__ == "__main__":
    main()
