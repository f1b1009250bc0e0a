"""Tables: rows of the package ``datasets``, from the hub, from a folder, or from the user's own objects."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ZeroBlockError, unknown
from .data_row import DataRow

SCHEME = "hf:"
"""The prefix of a task's name that is a dataset of the hub."""
HELD_OUT = ("validation", "test", "valid", "dev", "eval")
"""Names of the part to test on; the first one that a dataset has is used."""


@dataclass(frozen=True)
class TableRows(Sequence[DataRow]):
    """Rows of a table, read one by one: some datasets hold 100,000 rows, and a run takes 1,500.

    Args:
        table: a ``datasets.Dataset``, or any sequence of mappings.
        where: the table's name in error messages.
        columns: the table's own names of columns, by the names that layouts know.
    """

    table: Any
    where: str
    columns: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        where, fields = f"{self.where}[{index}]", self.table[int(index)]
        if not isinstance(fields, Mapping):
            raise ZeroBlockError(f"{where}: expected columns by name, found {type(fields).__name__}")
        for known, name in self.columns.items():
            if name not in fields:
                raise ZeroBlockError(f"{where}: no column {name!r}; the row has: {', '.join(fields)}")
            fields = {**fields, known: fields[name]}
        return DataRow(fields, where)


@dataclass(frozen=True)
class Tables:
    """The parts of a dataset as a source of rows.

    Args:
        name: the name of the task, also in messages.
        parts: the rows by ``"train"`` and, if there is one, ``"validation"``.
    """

    name: str
    parts: Mapping[str, TableRows]

    def __str__(self) -> str:
        return self.name

    def __call__(self, part: str, data: Path | None) -> TableRows | None:
        if data is not None:
            raise ZeroBlockError(f"{self.name} has its rows already: leave out --data")
        return self.parts.get(part)


def tables_of(data: Any, columns: Mapping[str, str] | None = None, name: str = "") -> Tables:
    """Make a source from a ``Dataset``, a ``DatasetDict``, or a list of rows.

    Args:
        data: rows that have a length and an index, or several such parts by name.
        columns: see :class:`TableRows`.
        name: the name of the dataset; by default its own.
    """
    parts = data if isinstance(data, Mapping) else {"train": data}
    for part in parts.values():
        if isinstance(part, str) or not hasattr(part, "__len__") or not hasattr(part, "__getitem__"):
            raise ZeroBlockError(
                f"expected a datasets.Dataset, a DatasetDict or a list of rows, got {type(part).__name__}; take rows "
                "out of a stream with list(stream.take(1000))"
            )
    names = _chosen(tuple(parts), None, None, name or "the dataset")
    name = name or getattr(getattr(parts[names["train"]], "info", None), "dataset_name", None) or "dataset"
    rows = {part: TableRows(parts[key], f"{name} {key}", columns or {}) for part, key in names.items()}
    return Tables(name, rows)


def _chosen(names: Sequence[str], train: str | None, held_out: str | None, what: str) -> dict[str, str]:
    """Choose the part to train on, and the one to test on, by their names in the dataset."""
    if train is None and "train" not in names and len(names) != 1:
        raise ZeroBlockError(f"{what} has no part called train but {', '.join(names) or 'none'}: name one with split=")
    train = train or ("train" if "train" in names else names[0])
    held_out = held_out or next((name for name in HELD_OUT if name in names and name != train), None)
    return {"train": train} | ({"validation": held_out} if held_out else {})


@dataclass(frozen=True)
class HubName:
    """A dataset of the hub as the command line writes it: ``hf:user/name,config=…,split=…,column=…``.

    Args:
        path: the path on the hub, or a local folder that ``datasets`` can load.
        settings: ``config``, ``revision``, ``split`` (to train on) and ``validation`` (to test on), where given.
        columns: the dataset's own names of columns, by the names that layouts know.

    >>> HubName.of("hf:openai/gsm8k,config=main,prompt=question,completion=answer", ("prompt", "completion"))
    HubName(path='openai/gsm8k', settings={'config': 'main'}, columns={'prompt': 'question', 'completion': 'answer'})
    """

    path: str
    settings: Mapping[str, str]
    columns: Mapping[str, str]

    KEYS = ("config", "revision", "split", "validation")

    @classmethod
    def of(cls, text: str, columns: Sequence[str]) -> HubName:
        """Parse a name.

        Args:
            text: the name on the command line.
            columns: the names that layouts know; ``text`` may map them to the dataset's own.
        """
        path, *given = text.removeprefix(SCHEME).split(",")
        if not path:
            raise ZeroBlockError(f"{text!r} names no dataset: write {SCHEME}user/name")
        values: dict[str, str] = {}
        for one in given:
            key, _, value = one.partition("=")
            if key not in (*cls.KEYS, *columns):
                raise unknown(f"setting of {SCHEME}{path}:", key, (*cls.KEYS, *columns))
            if not value:
                raise ZeroBlockError(f"{text!r} gives {key} no value: write {key}=NAME")
            values[key] = value
        return cls(
            path,
            {key: value for key, value in values.items() if key in cls.KEYS},
            {key: value for key, value in values.items() if key not in cls.KEYS},
        )

    def __str__(self) -> str:
        settings = (self.settings | self.columns).items()  # type: ignore[operator]
        return ",".join([f"{SCHEME}{self.path}", *(f"{key}={value}" for key, value in settings)])

    def load(self) -> Tables:
        """Load the parts of the dataset with the package ``datasets``."""
        datasets = package(f"{SCHEME}{self.path}")
        config, revision = self.settings.get("config"), self.settings.get("revision")
        train, held_out = self.settings.get("split"), self.settings.get("validation")
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it reports every retry
        hint = "; check its name, its settings and the network, and run hf auth login first if it is private"
        with failing(f"{SCHEME}{self.path}", hint):
            names = datasets.get_dataset_split_names(self.path, config, revision=revision)
        chosen = _chosen(names, train, held_out, str(self))
        for part in chosen.values():
            if (name := part.partition("[")[0]) not in names and "+" not in part:
                raise unknown(f"split of {SCHEME}{self.path}:", name, names)
        with failing(f"{SCHEME}{self.path}", hint):
            tables = {
                part: datasets.load_dataset(self.path, config, split=split, revision=revision)
                for part, split in chosen.items()
            }
        name = Path(self.path).name
        rows = {part: TableRows(table, f"{self.path} {chosen[part]}", self.columns) for part, table in tables.items()}
        return Tables(name, rows)


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk``."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def load_saved(folder: Path) -> Tables:
    """Load a folder that ``save_to_disk`` has written."""
    datasets = package(str(folder))
    with failing(str(folder)):
        data = datasets.load_from_disk(str(folder))
    return tables_of(data, name=folder.resolve().name)


def package(what: str, hint: str = "") -> Any:
    """Import the package ``datasets``; the error names what needs it."""
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise ZeroBlockError(f"{what} needs a package: pip install datasets{hint}") from error


@contextlib.contextmanager
def failing(what: str, hint: str = "") -> Iterator[None]:
    """Context manager that turns any exception of ``datasets`` into a one-line error.

    Args:
        what: the name of the data that is being read.
        hint: a suggested fix.
    """
    try:
        yield
    except Exception as error:  # network, cache and parsing raise different exceptions
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ZeroBlockError(f"cannot get {what} ({reason}){hint}") from error
