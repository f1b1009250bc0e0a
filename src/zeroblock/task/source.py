"""Sources of rows: a local folder of JSONL, or the hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from ..errors import ZeroBlockError
from .data_row import DataRow
from .reader import read_rows
from .table import TableRows, failing, package

Part = Literal["train", "validation"]


class Source(Protocol):
    """Gives the rows of one part of a dataset."""

    def __call__(self, part: Part, data: Path | None) -> Sequence[DataRow] | None:
        """Read the rows; None if the dataset has no such part.

        Args:
            part: ``"train"`` or ``"validation"``.
            data: the user's folder; None for the source's own data.
        """
        ...


@dataclass(frozen=True)
class Hub:
    """A dataset of the Hugging Face hub, or a local folder in the same layout.

    Args:
        name: the name of the task and of the local folder.
        path: the dataset on the hub.
        config: the dataset's configuration.
    """

    name: str
    path: str
    config: str | None = None

    def __str__(self) -> str:
        return f"{self.path}/{self.config}" if self.config else self.path

    def __call__(self, part: Part, data: Path | None) -> Sequence[DataRow]:
        return _load(self, part) if data is None else read_folder(self.name, part, data)


@dataclass(frozen=True)
class Files:
    """Two files as a source, in the folder that the user gives, if any.

    Args:
        folder: the folder of the files, unless the user gives another.
        train: name of the file to train on.
        validation: name of the file to test on; None to hold rows out.
    """

    folder: Path
    train: str
    validation: str | None = None

    def __str__(self) -> str:
        return str(self.folder / self.train)

    def __call__(self, part: Part, data: Path | None) -> list[DataRow] | None:
        name = self.train if part == "train" else self.validation
        return None if name is None else read_rows((data or self.folder) / name)


def read_folder(name: str, part: Part, data: Path) -> list[DataRow]:
    """Read the rows of ``DATA/name/part.jsonl``, or else of ``DATA/part.jsonl``."""
    files = (data / name / f"{part}.jsonl", data / f"{part}.jsonl")
    for file in files:
        if file.is_file():
            return read_rows(file)
    reason = "" if data.is_dir() else f" ({data} is not a folder)"
    raise ZeroBlockError(f"no {part} data for {name}: looked for {files[0]} and {files[1]}{reason}")


def _get(datasets: Any, hub: Hub, part: Part) -> Any:
    """Load one part of a dataset; for a script, which ``datasets`` no longer runs, load the hub's conversion."""
    try:
        return datasets.load_dataset(hub.path, hub.config, split=part)
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        files = f"hf://datasets/{hub.path}@refs%2Fconvert%2Fparquet/{hub.config or '*'}/{part}/*.parquet"
        return datasets.load_dataset("parquet", data_files=files, split="train")


def _load(hub: Hub, part: Part) -> TableRows:
    """Load one part of a dataset with the package ``datasets``."""
    hint = f", or point --data at a folder that holds {hub.name}/{part}.jsonl"
    datasets = package(f"{hub.name} comes from the hub and", hint)
    with failing(f"{hub} from the hub", f"; try again{hint}"):
        return TableRows(_get(datasets, hub, part), f"{hub} {part}")
