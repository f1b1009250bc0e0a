"""A sweep: one file that stands for many runs and one table (see :mod:`zeroblock.sweep.grid` for the file)."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ZeroBlockError
from ..train.config import EXECUTION, Config
from .grid import AVERAGED, Grid, Place, names, show


@dataclass(frozen=True)
class Run:
    """One training run.

    Args:
        name: of its folder: what varies, for people, then a digest of its configuration.
        config: all that it needs.
        varied: its values of the fields that vary in the sweep.
    """

    name: str
    config: Config
    varied: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """The end of the name, which stays when the sweep varies more fields."""
        return self.name.rpartition("-")[2]


@dataclass(frozen=True)
class Candidate:
    """One choice of the tuned fields, with a run for every seed.

    Args:
        values: of the tuned fields that vary.
        runs: in the order of the seeds.
    """

    values: Mapping[str, Any]
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Cell:
    """One place of the table: the candidates of which dev chooses one.

    Args:
        row: its row's name.
        task: its column.
        candidates: in the order of the file.
        voters: how many of a candidate's runs dev chooses by.
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
        """The runs that can be made before anything is chosen."""
        for candidate in self.candidates:
            yield from candidate.runs[: self.voters] if self.tuned else candidate.runs


@dataclass(frozen=True)
class Sweep:
    """What a sweep file says.

    Args:
        name: the file's, without its ending.
        cells: column by column, so that a sweep cut short has its first tasks whole.
        varied: the fields that vary.
    """

    name: str
    cells: tuple[Cell, ...]
    varied: tuple[str, ...]

    @classmethod
    def load(cls, path: Path, overrides: Mapping[str, Any] | None = None) -> Sweep:
        """Read and check a sweep file; nothing runs before every run's configuration is sound.

        Args:
            path: of the TOML file.
            overrides: fields that win over all that the file says.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ZeroBlockError(f"cannot read the sweep file {str(path)!r}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ZeroBlockError(f"{path}: not UTF-8") from error
        try:
            return cls.of(path.stem, tomllib.loads(text), overrides)
        except (ZeroBlockError, tomllib.TOMLDecodeError) as error:
            raise ZeroBlockError(f"{path}: {error}") from error

    @classmethod
    def of(cls, name: str, file: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Sweep:
        """A sweep from the contents of its file.

        Args:
            name: what to call it.
            file: see the module.
            overrides: fields that win over all that the file says.
        """
        grid = Grid.of(file, dict(overrides or {}))
        places = grid.places()
        namer = _Namer([config for place in places for _, configs in place.candidates for config in configs])
        return cls(name, tuple(namer.cell(place, grid.tune_seeds) for place in places), namer.varied)

    @property
    def rows(self) -> list[str]:
        """Names of the table's rows, in the order of the file."""
        return list(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def tasks(self) -> list[str]:
        """Names of the table's columns."""
        return list(dict.fromkeys(cell.task for cell in self.cells))

    @functools.cached_property
    def runs(self) -> dict[str, Run]:
        """Every run that may be made, by name; cells that need the same one share it."""
        return {run.name: run for cell in self.cells for candidate in cell.candidates for run in candidate.runs}


class _Namer:
    """Names runs: task, method, what varies among the runs of the two, seed, digest."""

    def __init__(self, configs: Sequence[Config]) -> None:
        alike: dict[tuple[str, str], list[Config]] = {}
        for config in configs:
            alike.setdefault((config.task, config.method), []).append(config)
        self.varied = _varied(configs)
        self._told = {key: _varied(group) for key, group in alike.items()}

    def cell(self, place: Place, tune_seeds: int | None) -> Cell:
        """A place of the table with its runs named."""
        candidates = tuple(Candidate(values, tuple(map(self.run, configs))) for values, configs in place.candidates)
        seeds = len(candidates[0].runs)
        return Cell(place.row, place.task, candidates, min(tune_seeds or seeds, seeds))

    def run(self, config: Config) -> Run:
        """A configuration with its name."""
        told = [_plain(Path(config.task).stem), config.method]
        for name in self._told[config.task, config.method]:
            value = getattr(config, name)
            if name not in AVERAGED and value is not None:
                told.append(_plain(value if isinstance(value, str) else f"{name}{show(value)}"))
        told += [f"seed{config.seed}", self._digest(config)]
        return Run("-".join(told), config, {name: getattr(config, name) for name in self.varied})

    def _digest(self, config: Config) -> str:
        """Eight letters for what a run is: equal for equal runs, whatever else is in the sweep.

        Fields at their defaults do not count, so that a field added to ``Config`` leaves old runs known.
        Nor do those of execution, unless they are what is compared.
        """
        said = {
            field.name: getattr(config, field.name)
            for field in dataclasses.fields(config)
            if getattr(config, field.name) != field.default
            and (field.name not in EXECUTION or field.name in self.varied)
        }
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:8]


def _varied(configs: Sequence[Config]) -> tuple[str, ...]:
    return tuple(name for name in names() if len({getattr(config, name) for config in configs}) > 1)


def _plain(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", text)
