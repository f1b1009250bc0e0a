"""The files of a run folder, read and checked, for the reports on the run."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ZeroBlockError, shown
from ..evaluate.measurement import MAX_FLOAT, MAX_SHOWN, SPLITS, Measurement, read_measurements
from ..train.config import Config, read, recorded
from .about import NAME as ABOUT
from .about import read_about
from .summary import MAX_BLOCKS, MODEL, check_summary, summarize

MAX_STEP = 2**32
"""Maximum number of steps of a run."""
MAX_HEADING = 2000
"""Maximum characters of the heading and of the command."""
STEP_COLUMNS = ("loss", "lr", "coeff")

Evaluations = dict[str, list[dict[str, Any]]]
Steps = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Source:
    """Everything that a report on a run is made of.

    Args:
        folder: the run's folder.
        config: the run's settings.
        command: the command that repeats the run.
        summary: the result so far; None before the first evaluation of trained weights.
        finished: whether the run has ended.
        splits: evaluations of each split, in the order of their steps.
        steps: the columns ``step``, ``block``, ``loss``, ``lr`` and ``coeff``, (n,) each.
        about: machine, versions and blocks; empty for a run of an older version.
    """

    folder: Path
    config: Config
    command: str
    summary: dict[str, Any] | None
    finished: bool
    splits: Evaluations
    steps: Steps
    about: dict[str, Any]

    @property
    def title(self) -> str:
        """Task, method and model."""
        return shown(f"{Path(self.config.task).stem}, {self.config.method}, {Path(self.config.model).name}")

    @property
    def taken(self) -> int:
        """Steps that the run has taken."""
        return int(self.steps["step"][-1]) + 1 if len(self.steps["step"]) else 0

    @property
    def journal(self) -> Path | None:
        """The journal, if the run has one."""
        path = self.folder / "journal.zbj"
        return path if path.is_file() else None

    def coeffs(self) -> list[list[float]] | None:
        """The coefficients of every step, one per probe, from the journal; None if it does not have all steps.

        The column ``coeff`` holds only their mean, and a method may have several probes.
        """
        from ..journal import read as read_journal

        try:
            found: list[list[float]] = read_journal(self.folder).records.coeffs.tolist()
        except (ZeroBlockError, OSError):
            return None
        return found if len(found) == len(self.steps["step"]) else None

    @property
    def blocks(self) -> list[str]:
        """The known names of the blocks."""
        return [block["name"] for block in self.about.get("blocks", [])]

    def commands(self) -> dict[str, str]:
        """The commands that continue, rebuild, share and repeat the run, by their labels."""
        place = str(self.folder)
        commands = {}
        if self.journal is not None:
            if not self.finished:
                commands["Continue the run"] = shlex.join(["zeroblock", "resume", place])
            if self.summary is not None:
                step = ["--step", str(self.summary["selected_step"])]
                words = ["zeroblock", "replay", place, *step, "--out", f"{place}/model"]
                commands[f"Rebuild the weights of step {step[1]}, which dev selected"] = shlex.join(words)
                words = ["zeroblock", "export", place, *step, "--out", f"{self.folder.name or 'run'}.zbj"]
                commands["Share the same as one small file"] = shlex.join(words)
        elif (self.folder / MODEL).is_dir() and self.summary is not None:
            label = f"Copy the weights of step {self.summary['selected_step']}, which dev selected, with their card"
            commands[label] = shlex.join(["zeroblock", "replay", place, "--out", "FOLDER"])
        commands["Make the run again"] = self.command
        return commands


def read_source(folder: Path) -> Source:
    """Read the files of a run folder; a damaged file raises a one-line error.

    Args:
        folder: the run folder, with ``config.toml`` and, if already written, ``metrics.jsonl``, ``steps.csv`` and
            ``summary.json``.
    """
    config = recorded(folder / "config.toml", trust_remote_code=True)  # no model is loaded here, so no code runs
    config = config.replace(trust_remote_code=read(folder / "config.toml").get("trust_remote_code") is True)
    command = (folder / "config.toml").read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
    name = ""
    try:
        name = "summary.json"
        finished = (folder / name).is_file()
        summary = check_summary(json.loads((folder / name).read_text(encoding="utf-8"))) if finished else None
        name = "metrics.jsonl"
        measurements = [measurement for _, measurement in read_measurements(folder / name)]
        name = ABOUT
        about = read_about(folder)
        name = "steps.csv"
        count = (summary or {}).get("blocks") or len(about.get("blocks", ())) or MAX_BLOCKS
        steps = _steps(folder / name, int(count))
    except (ValueError, KeyError, TypeError, RecursionError, csv.Error) as error:
        raise ZeroBlockError(f"{folder / name} is damaged ({error}): the report of the run needs it whole") from error
    if summary is None:
        with contextlib.suppress(ValueError):  # no evaluation of trained weights yet
            summary = summarize(config, measurements)
    if summary is not None:
        summary |= {key: shown(summary[key]) for key in ("metric", "selected_by")}
    if not about.get("blocks"):
        about["blocks"] = [{"name": name} for name in _journal_blocks(folder)]
    return Source(folder, config, command, summary, finished, _by_split(measurements), steps, about)


def _journal_blocks(folder: Path) -> tuple[str, ...]:
    """The names of the blocks from the journal, for a run of an older version."""
    from ..journal import read as read_journal

    with contextlib.suppress(ZeroBlockError, OSError):
        return read_journal(folder, 0).header.blocks
    return ()


def _by_split(measurements: list[Measurement]) -> Evaluations:
    """The evaluations of each split in the order of their steps; if a step has two, the later one counts."""
    by_step: dict[str, dict[int, dict[str, Any]]] = {split: {} for split in SPLITS}
    for measurement in measurements:
        by_step[measurement.split][measurement.step] = {
            "step": measurement.step,
            **dataclasses.asdict(measurement.evaluation),
        }
    return {split: [points[step] for step in sorted(points)] for split, points in by_step.items()}


def _steps(path: Path, blocks: int) -> Steps:
    """The columns ``step``, ``block``, ``loss``, ``lr`` and ``coeff``, (n,) each; NaN where a number is missing.

    Args:
        path: the file; a missing file has no rows.
        blocks: the number of blocks.
    """
    rows: list[dict[str, str]] = []
    if path.is_file():
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    steps: Steps = {
        "step": np.array([_index("step", row["step"], MAX_STEP) for row in rows], dtype=np.int64),
        "block": np.array([_index("block", row.get("block") or 0, blocks) for row in rows], dtype=np.int64),
    }
    for name in STEP_COLUMNS:
        values = np.array([float(row[name] if name == "loss" else row.get(name) or "nan") for row in rows])
        steps[name] = np.where(np.abs(values) < MAX_FLOAT, values, np.nan)
    return steps


def _index(name: str, text: str | int, count: int) -> int:
    number = int(text)
    if not 0 <= number < count:
        raise ValueError(f"{name} is {shown(number, MAX_SHOWN)}, of {count}")
    return number
