"""Outcomes: the results of finished runs, the candidate that dev chooses, and the runs still to make."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ..errors import ZeroBlockError
from .plan import Candidate, Cell, Run, Sweep

SUMMARY = "summary.json"


@dataclass(frozen=True)
class Outcome:
    """The result of one finished run.

    Args:
        metric: the name of the metric.
        dev: the metric on dev, at the step that dev selected.
        dev_loss: the loss on dev, at that step; NaN if none was measured.
        test: the metric on test, at that step.
        best: the best metric on test of all evaluations, as the paper reports it.
        steps: the number of steps taken.
        selected_step: the step that dev selected.
        seconds: the duration of the whole run.
    """

    metric: str
    dev: float
    dev_loss: float
    test: float
    best: float
    steps: int
    selected_step: int
    seconds: float

    @classmethod
    def read(cls, folder: Path) -> Outcome | None:
        """Read the outcome of a run folder; None if the run has not finished."""
        path = folder / SUMMARY
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
            dev, test = summary["dev"], summary["test"]
            return cls(
                metric=str(summary["metric"]),
                dev=_number(dev["value"]),
                dev_loss=_number(dev.get("loss")),
                test=_number(test["selected"]),
                best=_number(test["best"]),
                steps=int(summary.get("steps") or 0),
                selected_step=int(summary.get("selected_step") or 0),
                seconds=_number(summary.get("seconds")),
            )
        except FileNotFoundError:
            return None
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ZeroBlockError(
                f"{path} is not the summary of a run ({error!r}); remove it, and the sweep resumes the run"
            ) from error


Outcomes = Mapping[str, Outcome]
"""Finished runs, by name."""


def folder_of(run: Run, runs: Path) -> Path:
    """Find the folder of a run by its digest, whatever fields varied when the folder was named.

    Args:
        run: a run of the sweep.
        runs: the folder of run folders.
    """
    return next(iter(sorted(runs.glob(f"*-{run.digest}"))), runs / run.name)


def read(sweep: Sweep, runs: Path) -> dict[str, Outcome]:
    """Read the outcomes of all runs that have finished.

    Args:
        sweep: the sweep whose runs to read.
        runs: the folder of run folders.
    """
    folders = {path.name.rpartition("-")[2]: path for path in sorted(runs.glob("*-*"), reverse=True)}
    outcomes = {name: Outcome.read(folders[run.digest]) for name, run in sweep.runs.items() if run.digest in folders}
    return {name: outcome for name, outcome in outcomes.items() if outcome is not None}


def choose(cell: Cell, outcomes: Outcomes) -> Candidate | None:
    """Choose the candidate with the highest dev metric, averaged over the seeds that vote.

    Only candidates whose voting runs have all finished count.  Ties go to the lower dev loss, then
    to the first in the file.

    Args:
        cell: if it has nothing to choose, its only candidate is chosen.
        outcomes: the outcomes of the finished runs.
    """
    if not cell.tuned:
        return cell.candidates[0]
    ready = [candidate for candidate in cell.candidates if _done(candidate, cell, outcomes)]
    return max(ready, key=lambda candidate: _merit(candidate, cell, outcomes), default=None)


def settled(cell: Cell, outcomes: Outcomes) -> bool:
    """Whether the voting runs of every candidate have finished."""
    return not cell.tuned or all(_done(candidate, cell, outcomes) for candidate in cell.candidates)


def due(sweep: Sweep, outcomes: Outcomes, failed: Collection[str] = ()) -> list[Run]:
    """List the runs that can be made now: not finished, not failed, not waiting for a choice.

    Args:
        sweep: the sweep that the runs are for.
        outcomes: the outcomes of the finished runs.
        failed: names of runs not to try again.
    """
    runs: dict[str, Run] = {}
    for cell in sweep.cells:
        tuning = list(cell.tuning())
        wanted = tuning
        if all(run.name in outcomes or run.name in failed for run in tuning):
            chosen = choose(cell, outcomes)
            wanted = list(chosen.runs) if chosen else []
        runs |= {run.name: run for run in wanted if run.name not in outcomes and run.name not in failed}
    return list(runs.values())


def waiting(sweep: Sweep, outcomes: Outcomes) -> int:
    """Count the runs that wait for a choice."""
    return sum(len(cell.candidates[0].runs) - cell.voters for cell in sweep.cells if not settled(cell, outcomes))


def _voting(candidate: Candidate, cell: Cell) -> tuple[Run, ...]:
    return candidate.runs[: cell.voters]


def _done(candidate: Candidate, cell: Cell, outcomes: Outcomes) -> bool:
    return all(run.name in outcomes for run in _voting(candidate, cell))


def _merit(candidate: Candidate, cell: Cell, outcomes: Outcomes) -> tuple[float, float]:
    votes = [outcomes[run.name] for run in _voting(candidate, cell)]
    value, loss = fmean(one.dev for one in votes), fmean(one.dev_loss for one in votes)
    # NaN compares false with everything: a run that diverged must come last
    return (-math.inf if math.isnan(value) else value, -math.inf if math.isnan(loss) else -loss)


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
