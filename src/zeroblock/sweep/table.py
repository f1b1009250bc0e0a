"""The tables of a sweep: rows are cases, columns are tasks, cells are means over seeds."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from .. import atomic
from ..report.html_sweep import write_report
from .grid import show
from .outcome import Outcome, Outcomes, choose, due, settled, waiting
from .plan import Candidate, Cell, Run, Sweep

MISSING = "–"


@dataclass(frozen=True)
class Mean:
    """A mean over seeds.

    Args:
        value: the mean; NaN if there is nothing to average.
        spread: the sample standard deviation; NaN for fewer than two values.
        count: the number of values.
    """

    value: float
    spread: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """The mean of some numbers; NaN if one of them is.

        >>> Mean.of([1.0, 2.0, 3.0])
        Mean(value=2.0, spread=1.0, count=3)
        """
        if not values:
            return cls(math.nan, math.nan, 0)
        known = len(values) > 1 and all(map(math.isfinite, values))  # stdev fails on other values
        return cls(fmean(values), stdev(values) if known else math.nan, len(values))


@dataclass(frozen=True)
class Entry:
    """One filled cell of the table.

    Args:
        cell: the cell of the plan.
        chosen: the candidate that dev chose; None if none has finished.
        test: the test values at the dev-selected steps, over the seeds.
        best: the best test values of all evaluations, over the seeds.
        whole: whether the voting runs of every candidate have finished.
    """

    cell: Cell
    chosen: Candidate | None
    test: Mean
    best: Mean
    whole: bool

    @classmethod
    def of(cls, cell: Cell, outcomes: Outcomes) -> Entry:
        """Fill one cell from the finished runs."""
        chosen = choose(cell, outcomes)
        finished = [outcomes[run.name] for run in chosen.runs if run.name in outcomes] if chosen else []
        return cls(
            cell,
            chosen,
            Mean.of([outcome.test for outcome in finished]),
            Mean.of([outcome.best for outcome in finished]),
            settled(cell, outcomes),
        )

    def text(self, mean: Mean) -> str:
        """Write a mean for people, in percent."""
        if not mean.count:
            return MISSING
        wanted = len(self.cell.candidates[0].runs)
        count = f" (n={mean.count})" if mean.count == wanted else f" (n={mean.count} of {wanted})"
        spread = "" if math.isnan(mean.spread) else f" ± {100 * mean.spread:.1f}"
        return f"{100 * mean.value:.1f}{spread}{count if wanted > 1 else ''}{'' if self.whole else '*'}"

    @property
    def choice(self) -> str:
        """The chosen values of the tuned fields."""
        if not self.test.count or self.chosen is None:
            return MISSING
        return ", ".join(f"{name} {show(value)}" for name, value in self.chosen.values.items()) or "nothing to choose"


def write(sweep: Sweep, folder: Path, outcomes: Outcomes, failed: Mapping[str, str], command: str) -> None:
    """Write ``table.md``, ``table.csv``, ``runs.csv`` and ``report.html``, each atomically.

    Args:
        sweep: the sweep to report.
        folder: the folder to write to.
        outcomes: the outcomes of the runs that have finished.
        failed: why the others failed, by name.
        command: the command that makes these tables.
    """
    entries = [Entry.of(cell, outcomes) for cell in sweep.cells]
    atomic.write(folder / "table.md", markdown(sweep, entries, outcomes, failed, command))
    atomic.write(folder / "table.csv", csv_of(_table_rows(entries, outcomes)))
    atomic.write(folder / "runs.csv", csv_of(_run_rows(sweep, entries, outcomes, failed)))
    write_report(folder)


def markdown(
    sweep: Sweep, entries: Sequence[Entry], outcomes: Outcomes, failed: Mapping[str, str], command: str
) -> str:
    """Write the tables for people.

    Args:
        sweep: the sweep to report.
        entries: one for every cell.
        outcomes: the outcomes of the runs that have finished.
        failed: why the others failed, by name.
        command: the command that makes these tables.
    """
    metrics: dict[str, str] = {}
    for entry in entries:  # from the first row that has one
        metrics[entry.cell.task] = metrics.get(entry.cell.task) or _metric(entry.cell, outcomes)
    head = [f"{task} ({metrics[task]})" if metrics[task] not in ("", "accuracy") else task for task in sweep.tasks]
    by_cell = {(entry.cell.row, entry.cell.task): entry for entry in entries}

    def grid(text: Callable[[Entry], str]) -> list[str]:
        lines = ["| | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
        for row in sweep.rows:
            cells = [by_cell.get((row, task)) for task in sweep.tasks]
            texts = [row.replace("|", "\\|"), *(text(cell) if cell else MISSING for cell in cells)]
            lines.append(f"| {' | '.join(texts)} |")
        return lines

    lines = [
        f"# {sweep.name}",
        "",
        f"    {command}",
        "",
        "Test, in percent, at the step that dev selected, with the hyperparameters of the highest dev metric. "
        "Mean ± sample standard deviation over n seeds; one seed where no n is given.",
        "",
        *grid(lambda entry: entry.text(entry.test)),
        "",
        "## The best of the evaluations",
        "",
        "The same runs, reported as the paper does: the best test value of all evaluations, which looks at test.",
        "",
        *grid(lambda entry: entry.text(entry.best)),
    ]
    if any(entry.cell.tuned for entry in entries):
        lines += ["", "## Chosen by dev", "", *grid(lambda entry: entry.choice)]
    if not all(entry.whole or not entry.test.count for entry in entries):
        lines += ["", "\\* chosen among a part of the grid: the rest has not finished."]
    wanted = due(sweep, outcomes)
    if wanted:
        others = waiting(sweep, outcomes)
        lines += ["", "## Missing", ""]
        lines += [f"- {run.name}: {failed.get(run.name, 'not finished')}" for run in wanted]
        lines += [f"- {others} more, of the other seeds, once dev has chosen"] if others else []
    seconds = math.fsum(outcome.seconds for outcome in outcomes.values() if not math.isnan(outcome.seconds))
    lines += ["", f"{len(outcomes)} runs, {_span(seconds)} in total."]
    return "\n".join(lines) + "\n"


def _metric(cell: Cell, outcomes: Outcomes) -> str:
    runs = (run.name for candidate in cell.candidates for run in candidate.runs)
    return next((outcomes[name].metric for name in runs if name in outcomes), "")


def _table_rows(entries: Iterable[Entry], outcomes: Outcomes) -> list[dict[str, Any]]:
    return [
        {
            "row": entry.cell.row,
            "task": entry.cell.task,
            "metric": _metric(entry.cell, outcomes),
            "test": entry.test.value,
            "test_std": entry.test.spread,
            "best": entry.best.value,
            "best_std": entry.best.spread,
            "n": entry.test.count,
            "seeds": len(entry.cell.candidates[0].runs),
            "chosen": entry.choice if entry.test.count else "",
            "whole_grid": entry.whole,
        }
        for entry in entries
    ]


def _run_rows(
    sweep: Sweep, entries: Iterable[Entry], outcomes: Outcomes, failed: Mapping[str, str]
) -> list[dict[str, Any]]:
    """One row per run and cell: the values that vary, the outcome, and whether dev chose it."""
    rows: list[dict[str, Any]] = []
    for entry in entries:
        for candidate in entry.cell.candidates:
            for run in candidate.runs:
                outcome = outcomes.get(run.name)
                chosen = bool(outcome) and candidate is entry.chosen
                state = "finished" if outcome else "failed" if run.name in failed else "missing"
                rows.append(
                    {"run": run.name, "row": entry.cell.row, "task": entry.cell.task}
                    | settings(run)
                    | {"state": state, "chosen": chosen}
                    | {field: getattr(outcome, field, "") for field in Outcome.__dataclass_fields__}
                )
    return rows


def settings(run: Run) -> dict[str, Any]:
    """The varying fields of a run; a name that outcomes have too gets the prefix ``set_`` (dev is also a size)."""
    return {
        f"set_{name}" if name in Outcome.__dataclass_fields__ else name: value
        for name, value in run.varied.items()
        if name != "task"
    }


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows as CSV, with numbers to six digits; the first row names the columns."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _plain(value) for key, value in row.items()})
    return text.getvalue()


def _plain(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value


def _span(seconds: float) -> str:
    return (
        f"{seconds / 3600:.1f} h"
        if seconds >= 3600
        else f"{seconds / 60:.1f} min"
        if seconds >= 60
        else f"{seconds:.0f} s"
    )
