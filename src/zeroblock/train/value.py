"""Values of settings: checked against their types, and written as TOML."""

from __future__ import annotations

import json
import math
import types
import typing
from typing import Any, Literal

from ..errors import ZeroBlockError, unknown


def choices(kind: Any) -> tuple[str, ...]:
    """The values that a ``Literal`` in this type lists; empty without one."""
    kinds = [kind, *typing.get_args(kind)]
    return next((typing.get_args(k) for k in kinds if typing.get_origin(k) is Literal), ())


def checked(name: str, kind: Any, value: Any) -> Any:
    """Return the value as its type, or raise an error that says what was expected."""
    optional = typing.get_origin(kind) in (types.UnionType, typing.Union)
    if optional:
        if value is None:
            return None
        kind = next(k for k in typing.get_args(kind) if k is not types.NoneType)
    if typing.get_origin(kind) is Literal:
        if value not in typing.get_args(kind):
            raise unknown(name, str(value), typing.get_args(kind))
        return value
    if kind is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if type(value) is not kind:  # exactly: True is not a number of steps
        raise ZeroBlockError(f"{name} is {value!r}, expected {kind.__name__}{' or nothing' if optional else ''}")
    if kind is float and not math.isfinite(value):
        raise ZeroBlockError(f"{name} must be finite, got {value}")
    return value


def toml(value: Any) -> str:
    """Write a value as TOML."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which TOML escapes, unlike JSON
    return str(value).lower() if isinstance(value, bool) else repr(value)
