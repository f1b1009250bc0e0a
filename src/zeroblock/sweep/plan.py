"""The plan of a sweep: the runs and the table that one file describes (see :mod:`zeroblock.sweep.grid`)."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ZeroBlockError
from ..task import is_rows
from ..train.config import EXECUTION, Config, only_options
from .grid import AVERAGED, CellPlan, Grid, names, show

NAMES_OF_0_1 = {"schedule": "order", "lr_schedule": "schedule"}
"""Names in a run's digest, which must not change: a sweep finds its finished runs by digest."""


@dataclass(frozen=True)
class Run:
    """One training run.

    Args:
        name: the name of its folder: the values that vary, for people, then a digest of its configuration.
        config: its settings.
        varied: its values of the fields that vary in the sweep.
        maker: the module whose ``make`` function makes the run; empty for runs like those of ``zeroblock train``.
        more: further entries of the job, besides the configuration.
    """

    name: str
    config: Config
    varied: Mapping[str, Any]
    maker: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """The end of the name, which stays the same when the sweep varies more fields."""
        return self.name.rpartition("-")[2]


@dataclass(frozen=True)
class Candidate:
    """One choice of the tuned fields, with one run per seed.

    Args:
        values: the values of the tuned fields that vary.
        runs: one per seed, in the order of the seeds.
    """

    values: Mapping[str, Any]
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Cell:
    """One cell of the table: the candidates that dev chooses from.

    Args:
        row: the name of its row.
        task: its column.
        candidates: the candidates, in the order of the file.
        voters: the number of runs per candidate that dev chooses by.
    """

    row: str
    task: str
    candidates: tuple[Candidate, ...]
    voters: int

    @property
    def tuned(self) -> bool:
        """Whether there is anything to choose."""
        return len(self.candidates) > 1

    def tuning(self) -> Iterator[Run]:
        """List the runs that can be made before anything is chosen."""
        for candidate in self.candidates:
            yield from candidate.runs[: self.voters] if self.tuned else candidate.runs


@dataclass(frozen=True)
class Sweep:
    """The runs and the table of a sweep file.

    Args:
        name: the name of the file, without its suffix.
        cells: the cells, column by column, so that a sweep cut short has complete results for its first tasks.
        varied: the fields that vary.
    """

    name: str
    cells: tuple[Cell, ...]
    varied: tuple[str, ...]

    @classmethod
    def load(cls, path: Path, overrides: Mapping[str, Any] | None = None) -> Sweep:
        """Read and check a sweep file; no run starts before the configurations of all runs are valid.

        Args:
            path: the path of the TOML file.
            overrides: fields that win over everything in the file.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ZeroBlockError(f"cannot read the sweep file {str(path)!r}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ZeroBlockError(f"{path}: not UTF-8") from error
        try:
            return cls.of(path.stem, tomllib.loads(text), overrides)
        except (ZeroBlockError, ValueError, RecursionError) as error:
            raise ZeroBlockError(f"{path}: {error}") from error

    @classmethod
    def of(cls, name: str, file: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Sweep:
        """Make a sweep from the contents of its file.

        Args:
            name: the sweep's name.
            file: see :mod:`zeroblock.sweep.grid`.
            overrides: fields that win over everything in the file.
        """
        grid = Grid.of(file, dict(overrides or {}))
        cells = grid.cells()
        namer = _Namer([config for cell in cells for _, configs in cell.candidates for config in configs])
        return cls(name, tuple(namer.cell(cell, grid.tune_seeds) for cell in cells), namer.varied)

    @property
    def rows(self) -> list[str]:
        """The names of the rows, in the order of the file."""
        return list(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def tasks(self) -> list[str]:
        """The names of the columns."""
        return list(dict.fromkeys(cell.task for cell in self.cells))

    @functools.cached_property
    def runs(self) -> dict[str, Run]:
        """Every run that may be made, by name; cells that need the same run share it."""
        return {run.name: run for cell in self.cells for candidate in cell.candidates for run in candidate.runs}


class _Namer:
    """Names runs: task, method, the values that vary among the runs of both, seed, digest."""

    def __init__(self, configs: Sequence[Config]) -> None:
        alike: dict[tuple[str, str], list[Config]] = {}
        for config in configs:
            alike.setdefault((config.task, config.method), []).append(config)
        self.varied = _varied(configs)
        self._varied_within = {key: _varied(group) for key, group in alike.items()}

    def cell(self, plan: CellPlan, tune_seeds: int | None) -> Cell:
        """Name the runs of a cell."""
        candidates = tuple(Candidate(values, tuple(map(self.run, configs))) for values, configs in plan.candidates)
        seeds = len(candidates[0].runs)
        return Cell(plan.row, plan.task, candidates, min(tune_seeds or seeds, seeds))

    def run(self, config: Config) -> Run:
        """Name a configuration."""
        words = [_plain(Path(config.task).stem), config.method]
        for name in self._varied_within[config.task, config.method]:
            value = getattr(config, name)
            if name not in AVERAGED and value is not None:
                words.append(_plain(value if isinstance(value, str) else f"{name}{show(value)}"))
        words += [f"seed{config.seed}", self._digest(config)]
        return Run("-".join(words), config, {name: getattr(config, name) for name in self.varied})

    def _digest(self, config: Config) -> str:
        """Identify a run by eight characters, equal for equal runs, whatever else is in the sweep.

        Fields at their defaults do not count, so that the runs of older versions are still found when
        ``Config`` gets a new field.  Nor do settings of execution, unless the sweep compares them or, as the minutes of
        a run without a learning rate, they decide what a run learns.
        """
        given = config.lr is not None  # then these were the defaults of 0.1
        usual = {"eps": 1e-3, "lr_schedule": "constant"} if given else {}
        values = {
            NAMES_OF_0_1.get(field.name, field.name): getattr(config, field.name)
            for field in dataclasses.fields(config)
            if getattr(config, field.name) != usual.get(field.name, field.default)
            and field.name not in ("loss_over", "ending")
            and (field.name not in EXECUTION or field.name in self.varied or self._decides(field.name, config))
        }
        if config.loss_over != "examples" and not only_options(config.task):
            values["loss_over"] = "tokens"  # 0.1 averaged over examples, and had no such setting
        if config.ending != "newline" and is_rows(config.task):
            values["ending"] = "eos"  # 0.1 added a newline, and had no such setting
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]

    @staticmethod
    def _decides(name: str, config: Config) -> bool:
        """Whether a setting of execution decides what a run learns."""
        return name == "max_minutes" and config.timed


def _varied(configs: Sequence[Config]) -> tuple[str, ...]:
    return tuple(name for name in names() if len({getattr(config, name) for config in configs}) > 1)


def _plain(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", text)
