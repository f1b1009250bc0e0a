"""Data rows: the columns of one example, with the file and line they come from."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ZeroBlockError
from .example import DataError


@dataclass(frozen=True)
class DataRow:
    """One row of a dataset.

    Args:
        fields: values by column name.
        where: ``file:line``, or the hub's name and index; error messages begin with it.
    """

    fields: Mapping[str, Any]
    where: str = "row"

    def __getitem__(self, name: str) -> Any:
        """Get the value of a column; ``answers.text`` is the field ``text`` of the column ``answers``."""
        value: Any = self.fields
        for part in (name,) if name in self.fields else name.split("."):
            if isinstance(value, Mapping) and part in value and value[part] is None:
                raise DataError(f"column {name!r} is empty")
            if not isinstance(value, Mapping) or part not in value:
                raise DataError(f"no column {name!r}; the row has: {', '.join(map(str, self.fields)) or 'nothing'}")
            value = value[part]
        return value

    def text(self, name: str) -> str:
        """Get a column that holds text."""
        return _text(self[name], f"column {name!r}")

    def texts(self, name: str) -> tuple[str, ...]:
        """Get a column that holds a list of texts."""
        value = self[name]
        if not isinstance(value, (list, tuple)):
            raise DataError(f"column {name!r} holds {type(value).__name__}, expected a list of texts")
        return tuple(_text(item, f"column {name!r}") for item in value)

    def label(self, count: int, name: str = "label") -> int:
        """Get a column that holds the index of one of ``count`` classes."""
        value = self[name]
        if not isinstance(value, int) or not 0 <= value < count:
            raise DataError(f"unknown label {value!r} in column {name!r}; expected 0 to {count - 1}")
        return int(value)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{what} holds {type(value).__name__}, expected text")
    if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        # JSON can spell half a surrogate pair, which neither a tokenizer nor a terminal can encode
        raise DataError(f"{what} is not valid Unicode (half a surrogate pair)")
    return value


def read_rows(path: Path) -> list[DataRow]:
    """Read the rows of a JSONL or CSV file, each with its line number.

    Args:
        path: a ``.jsonl`` (or ``.json`` with one object per line) or ``.csv`` file, in UTF-8.
    """
    try:
        rows = list(_csv(path) if path.suffix == ".csv" else _jsonl(path))
    except OSError as error:
        raise ZeroBlockError(f"cannot read {path}: {error.strerror or error}") from error
    if not rows:
        raise ZeroBlockError(f"no rows in {path}")
    return rows


def _jsonl(path: Path) -> Iterator[DataRow]:
    # Read bytes: text mode would also break lines at characters that JSON allows inside a string.
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                fields = json.loads(line)
            except RecursionError as error:
                raise ZeroBlockError(f"{where}: nested too deeply") from error
            except json.JSONDecodeError as error:
                if line.lstrip().startswith(b"["):
                    raise ZeroBlockError(f"{where}: begins a JSON array; write one object per line") from error
                raise ZeroBlockError(f"{where}: invalid JSON ({error.msg} at column {error.colno})") from error
            except UnicodeDecodeError as error:
                raise ZeroBlockError(f"{where}: not UTF-8") from error
            except ValueError as error:  # Python converts at most 4,300 digits
                raise ZeroBlockError(f"{where}: invalid JSON (a number has too many digits)") from error
            if not isinstance(fields, dict):
                raise ZeroBlockError(f"{where}: expected a JSON object, found {type(fields).__name__}")
            yield DataRow(fields, where)


def _csv(path: Path) -> Iterator[DataRow]:
    with path.open("rb") as raw:
        csv.field_size_limit(1 << 30)
        reader = csv.reader(_decoded(raw, path), strict=True)
        header: list[str] | None = None
        begin = 1  # a quoted field may hold newlines, so a row is reported at the line where it begins
        try:
            for cells in reader:
                where, begin = f"{path}:{begin}", reader.line_num + 1
                if not cells:
                    continue
                if header is None:
                    header = cells
                    if twice := [name for name in header if header.count(name) > 1]:
                        raise ZeroBlockError(f"{where}: the header has the column {twice[0]!r} twice")
                    continue
                if len(cells) > len(header):
                    raise ZeroBlockError(f"{where}: more than the header's {len(header)} columns")
                yield DataRow(dict(itertools.zip_longest(header, cells)), where)
        except csv.Error as error:
            raise ZeroBlockError(f"{path}:{begin}: invalid CSV ({error})") from error


def _decoded(lines: Any, path: Path) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ZeroBlockError(f"{path}:{number}: not UTF-8") from error
