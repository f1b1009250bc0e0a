"""``report.html`` of a sweep: its table, the seeds behind every mean, the choices of dev, and every run."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from .. import atomic
from ..errors import ZeroBlockError, shown
from .html import REPORT, card, command, fact, page, percent, plain, span, table
from .html_chart import attribute, number, text, ticks, view

MAX_CELLS = 10_000
"""Maximum rows that a report reads from a table."""
ROW_HEIGHT, LABEL, WIDTH = 30, 190, 560
FILES = ("table.md", "table.csv", "runs.csv")
KNOWN = (
    "run",
    "row",
    "task",
    "state",
    "chosen",
    "metric",
    "dev",
    "dev_loss",
    "test",
    "best",
    "steps",
    "selected_step",
    "seconds",
)
"""Columns of ``runs.csv`` that every sweep has; the others are the fields that vary."""

Row = Mapping[str, str]


def write_report(folder: Path) -> Path:
    """Write ``report.html`` of a sweep's folder from its tables, and return its path.

    Args:
        folder: the sweep's folder, with ``table.md``, ``table.csv`` and ``runs.csv``.
    """
    cells, runs = _read(folder / "table.csv"), _read(folder / "runs.csv")
    head = (folder / "table.md").read_text(encoding="utf-8").splitlines()[:3]
    name = head[0].lstrip("# ") if head else folder.name
    line = head[2].strip() if len(head) > 2 else ""
    rows, tasks = _unique(cells, "row"), _unique(cells, "task")
    by_cell = {(cell["row"], cell["task"]): cell for cell in cells}
    unique = list({run["run"]: run for run in runs}.values())
    done = [run for run in unique if run["state"] == "finished"]
    body = [
        _header(name, unique),
        _means(rows, tasks, by_cell),
        _facts(unique, done, rows, tasks),
        '<div class="grid2">' + "".join(_dots(task, rows, by_cell, runs) for task in tasks) + "</div>",
        _chosen(rows, tasks, by_cell),
        _runs(folder, unique),
        card("Command", command("Run the sweep, or the rest of it", line)) if line else "",
        "<footer>Made by zeroblock from the files in this folder: "
        + ", ".join(f'<a href="{file}">{file}</a>' for file in FILES)
        + "</footer>",
    ]
    path = folder / REPORT
    atomic.write(path, page(f"{name}: a sweep", body))
    return path


def _read(path: Path) -> list[Row]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows: list[Row] = [dict(row) for row in itertools.islice(csv.DictReader(file, restval=""), MAX_CELLS)]
    except OSError as error:
        raise ZeroBlockError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, csv.Error) as error:
        raise ZeroBlockError(f"{path} is damaged ({error}): make the sweep again, finished runs are kept") from error
    needed = {"row", "task", "test", "test_std"} if path.name == "table.csv" else set(KNOWN)
    if rows and (missing := needed - set(rows[0])):
        raise ZeroBlockError(f"{path} has no column {sorted(missing)[0]}: make the sweep again, finished runs are kept")
    return rows


def _unique(rows: Sequence[Row], column: str) -> list[str]:
    return list(dict.fromkeys(row[column] for row in rows))


def _float(value: str) -> float:
    try:
        return float(value) if abs(float(value)) < 1e38 else math.nan
    except ValueError:
        return math.nan


def _header(name: str, runs: Sequence[Row]) -> str:
    done = sum(run["state"] == "finished" for run in runs)
    failed = sum(run["state"] == "failed" for run in runs)
    whole = done and not any(run["state"] == "failed" for run in runs)
    state = f'<span class="pill {"done" if whole else "going"}">{done} runs finished</span>'
    more = f"{failed} failed" if failed else ""
    return f'<header><h1>{plain(name)}</h1><div class="soft">{state}{more}</div></header>'


def _means(rows: list[str], tasks: list[str], cells: Mapping[tuple[str, str], Row]) -> str:
    """Rows are cases, columns are tasks, cells are means over seeds; the best of every column is tinted."""
    found = {task: [_float(cells.get((row, task), {}).get("test", "")) for row in rows] for task in tasks}
    best = {task: max((v for v in values if v == v), default=None) for task, values in found.items()}
    differ = {task: len({v for v in values if v == v}) > 1 for task, values in found.items()}
    lines = []
    for row in rows:
        texts = []
        for task in tasks:
            cell = cells.get((row, task), {})
            mean, spread = _float(cell.get("test", "")), _float(cell.get("test_std", ""))
            shown_mean = percent(mean) + (
                "" if math.isnan(spread) else f' <span class="soft">± {100 * spread:.1f}</span>'
            )
            style = ' class="n best"' if differ[task] and mean == best[task] else ' class="n"'
            texts.append(f"<td{style}>{shown_mean}</td>")
        lines.append(f"<tr><td>{plain(row or 'result')}</td>{''.join(texts)}</tr>")
    head = "".join(f'<th class="n">{plain(Path(task).stem)}{_metric(task, cells)}</th>' for task in tasks)
    note = (
        '<p class="soft small">Test, at the step and with the hyperparameters that dev selected; mean ± sample '
        "standard deviation over the seeds.</p>"
    )
    return card("Results", note, f'<div class="scroll"><table><tr><th></th>{head}</tr>{"".join(lines)}</table></div>')


def _metric(task: str, cells: Mapping[tuple[str, str], Row]) -> str:
    names = {cell.get("metric", "") for (_, one), cell in cells.items() if one == task} - {"", "accuracy"}
    return f" ({plain(sorted(names)[0])})" if names else ""


def _facts(runs: Sequence[Row], done: Sequence[Row], rows: list[str], tasks: list[str]) -> str:
    seconds = math.fsum(s for run in done if (s := _float(run["seconds"])) == s)
    facts = [(f"{len(done):,} of {len(runs):,}", "runs"), (f"{len(rows):,}", "rows"), (f"{len(tasks):,}", "tasks")]
    facts.append((span(seconds), "total time"))
    return f'<div class="facts">{"".join(fact(*one) for one in facts)}</div>'


def _dots(task: str, rows: list[str], cells: Mapping[tuple[str, str], Row], runs: Sequence[Row]) -> str:
    """One line per row of the table: a dot per run, faint if dev did not choose the run, and a bar at the mean."""
    mine = [
        run
        for run in runs
        if run["task"] == task and run["state"] == "finished" and _float(run["test"]) == _float(run["test"])
    ]
    if not mine:
        return ""
    low, high = view([], [100 * _float(run["test"]) for run in mine])
    bottom = ROW_HEIGHT * len(rows)

    def px(value: float) -> float:
        return LABEL + (value - low) / (high - low) * (WIDTH - LABEL - 20)

    marks = ticks(low, high, 4)
    grid = "".join(f"M{px(v):.1f} 0V{bottom}" for v in marks)
    parts = [f'<path class="grid" d="{grid}"/>']
    for i, row in enumerate(rows):
        y = ROW_HEIGHT * i + ROW_HEIGHT / 2
        label = shown(row or "result", 26)
        parts.append(f'<text x="{LABEL - 10}" y="{y + 4}" text-anchor="end">{text(label)}</text>')
        for run in mine:
            if run["row"] == row:
                style = "c-dev" if run["chosen"] == "true" else "c-raw"
                value = 100 * _float(run["test"])
                parts.append(
                    f'<circle class="dot {style}" cx="{px(value):.1f}" cy="{y}" r="{5 if style == "c-dev" else 3.5}">'
                    f"<title>{plain(run['run'])}: {value:.1f} %</title></circle>"
                )
        mean = 100 * _float(cells.get((row, task), {}).get("test", ""))
        if mean == mean:
            parts.append(f'<path class="line c-test" d="M{px(mean):.1f} {y - 9}v18"/>')
    parts += [f'<text x="{px(v):.1f}" y="{bottom + 18}" text-anchor="middle">{number(v)} %</text>' for v in marks]
    chart = (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {bottom + 26}" role="img" aria-label="{text(task)}" '
        f'data-runs="{attribute(len(mine))}">{"".join(parts)}</svg>'
    )
    legend = (
        '<div class="legend"><span class="key"><i class="c-dev"></i>runs that dev chose</span>'
        '<span class="key"><i class="c-raw"></i>other runs</span>'
        '<span class="key"><i class="c-test"></i>mean</span></div>'
    )
    return card(f"{plain(Path(task).stem)}: every run on test", legend, chart, style="figure")


def _chosen(rows: list[str], tasks: list[str], cells: Mapping[tuple[str, str], Row]) -> str:
    choices = {key: cell.get("chosen", "") for key, cell in cells.items()}
    if not any(choice not in ("", "nothing to choose") for choice in choices.values()):
        return ""
    lines = [[plain(row or "result"), *(plain(choices.get((row, task), "") or "–") for task in tasks)] for row in rows]
    return card("Chosen by dev", table(["", *(plain(Path(task).stem) for task in tasks)], lines))


def _runs(folder: Path, runs: Sequence[Row]) -> str:
    """Every run with its outcome and a link to its own report."""
    varied = [
        name for name in (runs[0] if runs else {}) if name and name not in KNOWN and any(run[name] for run in runs)
    ]
    lines = []
    for run in runs:
        name = plain(run["run"], 200)
        there = "/" not in run["run"] and (folder / "runs" / run["run"] / REPORT).is_file()
        link = f'<a href="runs/{quote(run["run"])}/{REPORT}">{name}</a>' if there else name
        values = [percent(_float(run[key])) for key in ("dev", "test")]
        seconds = _float(run["seconds"])
        values += [plain(run["selected_step"], 20), "–" if math.isnan(seconds) else span(seconds)]
        lines.append([link, *(plain(run[field], 40) for field in varied), plain(run["state"], 20), *values])
    head = ["run", *(plain(name, 40) for name in varied), "state", "dev", "test", "selected step", "time"]
    count = len(varied)
    body = table(head, lines, numbers=range(2 + count, 6 + count))
    return card("Runs", body.replace('class="scroll"', 'class="scroll tall"', 1))
