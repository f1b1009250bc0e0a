"""Tables and a figure of the races of ``run.sh tasks``, all models in one file.

    python results/lrfree/table.py RACES [OUT]

Reads ``RACES/NAME/TASK/runners.csv`` of every model NAME, and ``RACES/NAME-icl/runs.csv`` if it exists; writes
``tasks.md``, ``tasks.csv`` and, with matplotlib, ``tasks.svg`` into OUT, which is RACES by default.
"""

from __future__ import annotations

import csv
import importlib.util
import math
import sys
from collections import defaultdict
from pathlib import Path

from zeroblock.sweep.table import Mean

FREE, GRID = {"mezo_bcd auto": "MeZO-BCD, no lr", "fzoo_bcd auto": "FZOO-BCD, no lr"}, "mezo_bcd"
"""Entrants without a learning rate, and the grid that they are compared with."""
ROWS = {
    "zero-shot": "Zero-shot",
    "icl": "ICL, 8 shots",
    "mezo": "MeZO, hand-set lr",
    "lozo": "LOZO, hand-set lr",
    GRID: "MeZO-BCD, hand-set lr",
    **FREE,
    "ft": "Adam fine-tuning, hand-set lr",
}
TASKS = ("sst2", "rte", "cb", "boolq", "wsc", "wic", "multirc", "copa", "record", "squad", "drop")
MODELS = ("smollm2", "gemma", "qwen")
LOST = 1.25
"""A run that ends with more than this multiple of the dev loss before training, or without a dev loss, diverged."""
WITHIN = 0.01
"""A default that is at most this far below the best hand-set learning rate counts as within a point of it."""

ROUNDING = 1e-5
"""Results in the files have six digits, so equal ones may differ by less than this."""

Cells = dict[str, dict[str, list[float]]]
"""Test results by row and task, one number per seed."""


def read(folder: Path) -> tuple[Cells, list[dict[str, str]]]:
    """The test results of a model, and the rows they come from."""
    cells: Cells = defaultdict(lambda: defaultdict(list))
    rows = []
    for path in sorted(folder.glob("*/runners.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            rows += [row | {"model": folder.name} for row in csv.DictReader(file)]
    for row in rows:
        cells[row["entrant"]][row["task"]].append(float(row["test"] or "nan"))
    shots = folder.with_name(f"{folder.name}-icl") / "runs.csv"
    if shots.is_file():
        with shots.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row["state"] == "finished":
                    cells["icl"][row["task"]].append(float(row["test"]))
    return cells, rows


def ends_of(folder: Path) -> dict[str, list[float]]:
    """The last dev loss of every runner of a model, divided by the one before training, by entrant."""
    found: dict[str, list[float]] = defaultdict(list)
    for path in sorted(folder.glob("*/race.csv")):
        losses: dict[tuple[str, str], list[float]] = defaultdict(list)
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                losses[row["entrant"], row["seed"]].append(float(row["dev_loss"] or "nan"))
        for (entrant, _), values in losses.items():
            found[entrant].append(values[-1] / values[0])
    return found


def markdown(folder: Path, cells: Cells, rows: list[dict[str, str]]) -> list[str]:
    """The table of a model, and the comparison of entrants without a learning rate with the grid."""
    name, ends = folder.name, ends_of(folder)
    tasks = [task for task in TASKS if any(task in row for row in cells.values())]
    seeds = max(len(values) for row in cells.values() for values in row.values())
    minutes = sorted({float(row["minutes"]) for row in rows})
    shared = sorted({row["jobs"] for row in rows})
    tried = {len(row["lrs_tried"].split()) for row in rows if row["entrant"] == GRID}
    machines = sorted({row["machine"] for row in rows})
    choice = "was not tuned" if tried == {1} else f"is the best of {' or '.join(map(str, sorted(tried)))} on dev"
    lines = [f"## {name}", ""]
    lines += [
        f"Test in percent, mean ± sample standard deviation over {seeds} seeds of data and noise; "
        f"{' or '.join(f'{60 * one:g}' for one in minutes)} s of training per runner, {' or '.join(shared)} at a time "
        f"({' or '.join(machines)})." + (f" A hand-set lr {choice}." if tried else ""),
        "",
        "| | " + " | ".join(tasks) + " |",
        "|---|" + "---:|" * len(tasks),
    ]
    for key, label in ROWS.items():
        if key in cells:
            shown = [_percent(cells[key].get(task, []), seeds) for task in tasks]
            lines.append(f"| {label} | " + " | ".join(shown) + " |")
    for key, label in FREE.items():
        if not ends[key]:
            continue
        lost, own = (sum(math.isnan(one) or one > LOST for one in ends[who]) for who in (key, GRID))
        both = [task for task in tasks if cells[key].get(task) and cells[GRID].get(task)]
        said = f"{lost or 'none'} of its {len(ends[key])} runs diverged"
        if both:
            ahead = {task: Mean.of(cells[key][task]).value - Mean.of(cells[GRID][task]).value for task in both}
            most = [task for task in both if ahead[task] >= -ROUNDING]
            near = [task for task in both if -WITHIN <= ahead[task] < -ROUNDING]
            worse = [f"{task} ({100 * ahead[task]:.1f})" for task in both if task not in (*most, *near)]
            behind = f"; behind by more on {', '.join(worse)}" if worse else ""
            said = (
                f"at least as good as MeZO-BCD with a hand-set lr on {len(most)} of {len(both)} tasks, "
                f"within a point on {len(near)} more{behind}. {said.capitalize()}, "
                f"and {own or 'none'} of those with a hand-set lr"
            )
        lines += ["", f"{label}: {said}."]
    return [*lines, ""]


def draw(path: Path, found: dict[str, Cells]) -> None:
    """Draw the test results of the default and the others, a panel per model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    marks = {"zero-shot": "_", "icl": "x", "mezo": "s", "lozo": "^", GRID: "o", **dict.fromkeys(FREE, "D"), "ft": "*"}
    figure, panels = plt.subplots(len(found), 1, figsize=(8, 2.6 * len(found)), squeeze=False, layout="constrained")
    shown = {}
    for panel, (name, cells) in zip(panels[:, 0], found.items(), strict=True):
        tasks = [task for task in TASKS if any(task in row for row in cells.values())]
        keys = [key for key in marks if key in cells]
        for i, key in enumerate(keys):
            means = [Mean.of(cells[key].get(task, [])) for task in tasks]
            x = [at + (i - (len(keys) - 1) / 2) * 0.1 for at in range(len(tasks))]
            spread = [0.0 if math.isnan(mean.spread) else 100 * mean.spread for mean in means]
            height = [100 * mean.value for mean in means]
            colour = f"C{list(marks).index(key)}"
            shown[ROWS[key]] = panel.errorbar(x, height, spread, fmt=marks[key], color=colour, ms=5, lw=1)
        panel.set_xticks(range(len(tasks)), tasks)
        panel.set(title=name, ylabel="test, %")
    labels = [label for label in ROWS.values() if label in shown]
    handles = [shown[label] for label in labels]
    figure.legend(handles, labels, frameon=False, fontsize=7, ncols=4, loc="outside lower center")
    figure.savefig(path)


def main() -> None:
    races, out = Path(sys.argv[1]), Path(sys.argv[-1])
    lines, rows, found = ["# Without a learning rate, compared with a hand-set one", ""], [], {}
    for folder in sorted(one for one in races.iterdir() if one.name in MODELS and list(one.glob("*/runners.csv"))):
        found[folder.name], mine = read(folder)
        lines += markdown(folder, found[folder.name], mine)
        rows += mine
    if not rows:
        sys.exit(f"{races} holds no races: results/lrfree/run.sh tasks makes them")
    out.mkdir(parents=True, exist_ok=True)
    (out / "tasks.md").write_text("\n".join(lines), encoding="utf-8")
    with (out / "tasks.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    if importlib.util.find_spec("matplotlib"):
        draw(out / "tasks.svg", found)
    print("\n".join(lines))


def _percent(values: list[float], seeds: int) -> str:
    """The mean and its spread; a mean over fewer seeds says over how many."""
    mean = Mean.of(values)
    if not mean.count:
        return "–"
    spread = "" if math.isnan(mean.spread) else f" ± {100 * mean.spread:.1f}"
    few = f" ({mean.count} of {seeds} seeds)" if mean.count < seeds else ""
    return f"{100 * mean.value:.1f}{spread}{few}"


if __name__ == "__main__":
    main()
