"""Data rows: the columns of one example, with the file and line they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .example import DataError


@dataclass(frozen=True)
class DataRow:
    """One row of a dataset.

    Args:
        fields: values by column name.
        where: ``file:line``, or a dataset's name and the row's index; error messages begin with it.
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
