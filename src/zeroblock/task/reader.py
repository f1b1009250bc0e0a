"""Readers: the rows of a file, each with the line that error messages name."""

from __future__ import annotations

import csv
import importlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import ZeroBlockError
from .data_row import DataRow

CHATS = ("messages", "conversations")
"""Columns that hold a chat's list of messages: a JSON object with one of them is a row and does not hold rows."""


def read_rows(path: Path) -> list[DataRow]:
    """Read the rows of a file, each with its line number (in Parquet, the number of the row).

    Args:
        path: ``.jsonl`` (one object per line), ``.json`` (the same, a list of objects, or an object that holds
            one such list), ``.csv`` with a header, all in UTF-8; or ``.parquet``.
    """
    try:
        rows = list(READERS.get(path.suffix, _jsonl)(path))
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
                fields = _parsed(where, json.loads, line.rstrip())  # an error at the end is not on the next line
            except ZeroBlockError as error:
                if line.lstrip().startswith(b"["):
                    raise ZeroBlockError(
                        f"{where}: begins a JSON list; write one object per line, or name the file .json"
                    ) from error
                raise
            yield _row(fields, where)


def _json(path: Path) -> Iterator[DataRow]:
    """Read the rows of one JSON value; if the file is not one, read it as JSON lines."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return _jsonl(path)  # its error names the line
    scan = _Scan(text, path)
    if scan.peek() == "[":
        return scan.rows()
    begin = scan.at
    try:
        whole = scan.value()
    except ZeroBlockError:
        return _jsonl(path)
    if scan.peek() or not isinstance(whole, dict):
        return _jsonl(path)
    lists = [k for k, v in whole.items() if isinstance(v, list) and v and all(isinstance(one, dict) for one in v)]
    if not lists or set(lists) & set(CHATS):
        return iter([DataRow(whole, scan.where(begin))])
    if len(lists) > 1:
        raise ZeroBlockError(f"{path}: has several lists of rows ({', '.join(lists)}): keep one per file")
    return scan.member(begin, lists[0])


class _Scan:
    """Scans JSON text, and knows the line of every value.

    Args:
        text: the content of the file.
        path: the file's path, for error messages.
    """

    def __init__(self, text: str, path: Path) -> None:
        self.text, self.path, self.at = text, path, 0
        self._line, self._counted = 1, 0

    def where(self, at: int) -> str:
        """Return ``file:line`` of an offset; offsets must not decrease from call to call."""
        self._line += self.text.count("\n", self._counted, at)
        self._counted = at
        return f"{self.path}:{self._line}"

    def peek(self) -> str:
        """Return the next character that is not whitespace, or an empty string at the end."""
        while self.at < len(self.text) and self.text[self.at] in " \t\r\n":
            self.at += 1
        return self.text[self.at : self.at + 1]

    def value(self) -> Any:
        """Read the value that begins at the next character."""
        self.peek()
        try:
            value, self.at = _parsed(str(self.path), _DECODER.raw_decode, self.text, self.at)
        except ZeroBlockError as error:
            if not isinstance(error.__cause__, json.JSONDecodeError):
                raise
            where, cause = f"{self.path}:{error.__cause__.lineno}", error.__cause__
            raise ZeroBlockError(f"{where}: invalid JSON ({cause.msg} at column {cause.colno})") from cause
        return value

    def rows(self) -> Iterator[DataRow]:
        """Read the list that begins here."""
        self.at += 1
        while (found := self.peek()) not in ("]", ""):
            if found == ",":
                self.at += 1
                continue
            where = self.where(self.at)
            yield _row(self.value(), where)
        if not found:
            raise ZeroBlockError(f"{self.where(len(self.text))}: invalid JSON (the list has no end)")

    def member(self, begin: int, name: str) -> Iterator[DataRow]:
        """Read the list under the key ``name`` of the object at ``begin``."""
        self.at = begin + 1
        while self.value() != name:
            self._skip()  # the colon
            self.value()
            self._skip()  # the comma
        self._skip()
        self.peek()
        return self.rows()

    def _skip(self) -> None:
        self.peek()
        self.at += 1


_DECODER = json.JSONDecoder()


def _parsed(where: str, parse: Callable[..., Any], *arguments: Any) -> Any:
    """Call a JSON parser, and turn its exceptions into one-line errors."""
    try:
        return parse(*arguments)
    except RecursionError as error:
        raise ZeroBlockError(f"{where}: nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ZeroBlockError(f"{where}: invalid JSON ({error.msg} at column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise ZeroBlockError(f"{where}: not UTF-8") from error
    except ValueError as error:  # Python converts at most 4,300 digits
        raise ZeroBlockError(f"{where}: invalid JSON (a number has too many digits)") from error


def _row(fields: Any, where: str) -> DataRow:
    if not isinstance(fields, dict):
        raise ZeroBlockError(f"{where}: expected a JSON object, found {type(fields).__name__}")
    return DataRow(fields, where)


def _parquet(path: Path) -> Iterator[DataRow]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ZeroBlockError(f"{path} is a Parquet file: pip install pyarrow") from error
    try:
        with path.open("rb") as raw, parquet.ParquetFile(raw) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches())
            for number, fields in enumerate(itertools.chain.from_iterable(batches), start=1):
                yield DataRow(fields, f"{path}:{number}")
    except OSError:
        raise
    except Exception as error:  # pyarrow's exceptions derive from several of Python's
        raise ZeroBlockError(f"{path}: invalid Parquet ({str(error).splitlines()[0]})") from error


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


READERS: dict[str, Callable[[Path], Iterator[DataRow]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
"""The reader for each file suffix."""
