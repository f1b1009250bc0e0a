"""Sources of rows: a local folder of JSONL, or the hub."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from ..errors import ZeroBlockError
from .data_row import DataRow, read_rows

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
        name: of the task, and of the local folder.
        path: the dataset on the hub.
        config: its configuration.
    """

    name: str
    path: str
    config: str | None = None

    def __str__(self) -> str:
        return f"{self.path}/{self.config}" if self.config else self.path

    def __call__(self, part: Part, data: Path | None) -> Sequence[DataRow]:
        return HubRows.load(self, part) if data is None else read_folder(self.name, part, data)


def read_folder(name: str, part: Part, data: Path) -> list[DataRow]:
    """Read the rows of ``DATA/name/part.jsonl``, or else of ``DATA/part.jsonl``."""
    files = (data / name / f"{part}.jsonl", data / f"{part}.jsonl")
    for file in files:
        if file.is_file():
            return read_rows(file)
    reason = "" if data.is_dir() else f" ({data} is not a folder)"
    raise ZeroBlockError(f"no {part} data for {name}: looked for {files[0]} and {files[1]}{reason}")


def _get(datasets: Any, hub: Hub, part: Part) -> Any:
    """Get one part of a dataset; of a script, which ``datasets`` no longer runs, get the hub's own conversion."""
    try:
        return datasets.load_dataset(hub.path, hub.config, split=part)
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        files = f"hf://datasets/{hub.path}@refs%2Fconvert%2Fparquet/{hub.config or '*'}/{part}/*.parquet"
        return datasets.load_dataset("parquet", data_files=files, split="train")


@dataclass(frozen=True)
class HubRows(Sequence[DataRow]):
    """Rows of the hub, read one by one: some datasets hold 100,000, and a run takes 1,500."""

    table: Any
    where: str

    @classmethod
    def load(cls, hub: Hub, part: Part) -> HubRows:
        """Get one part of a dataset through the package ``datasets``."""
        hint = f"or point --data at a folder that holds {hub.name}/{part}.jsonl"
        try:
            datasets = importlib.import_module("datasets")
        except ImportError as error:
            raise ZeroBlockError(f"{hub.name} comes from the hub: pip install datasets, {hint}") from error
        try:
            table = _get(datasets, hub, part)
        except Exception as error:  # network, cache and parsing each raise exceptions of their own
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ZeroBlockError(f"cannot get {hub} from the hub ({reason}); try again, {hint}") from error
        return cls(table, f"{hub} {part}")

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return DataRow(self.table[int(index)], f"{self.where}[{index}]")
