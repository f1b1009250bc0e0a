"""Errors and warnings, in words that name the fix."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable
from typing import Any


class ZeroBlockError(Exception):
    """An error that the user can fix; the command line prints it as one line."""


class DivergenceError(ZeroBlockError):
    """The loss of a run is not finite any more."""


class ZeroBlockWarning(UserWarning):
    """Something the user should know that does not stop the run."""


def unknown(kind: str, name: str, known: Iterable[str]) -> ZeroBlockError:
    """The error for a misspelt name: suggests the nearest one, or lists them all.

    >>> print(unknown("method", "mezo_bdc", ["mezo", "mezo_bcd"]))
    unknown method 'mezo_bdc'; did you mean 'mezo_bcd'?
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose from: {', '.join(known)}"
    return ZeroBlockError(f"unknown {kind} {name!r}; {hint}")


class Renamed:
    """An attribute under its old name, for one release: reads the new one and warns.

    >>> class Engine:
    ...     reason = "it is compiled"
    ...     why = Renamed("reason")
    """

    def __init__(self, new: str) -> None:
        self.new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self.old = name

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        warn_renamed(f"{owner.__name__}.{self.old}", f"{owner.__name__}.{self.new}", stacklevel=3)
        return getattr(instance, self.new)


def warn_renamed(old: str, new: str, stacklevel: int = 2) -> None:
    """Warn that a name is old, and name the new one."""
    warnings.warn(
        f"{old} is now called {new}; the old name works until 0.3", ZeroBlockWarning, stacklevel=stacklevel + 1
    )


def shown(text: object, limit: int = 200) -> str:
    r"""Text from someone else's file, made safe to print: one line, without control characters, of bounded length.

    >>> shown("\x1b[2Jred\nline")
    '\\x1b[2Jred\\nline'
    """
    escaped = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text)[: limit + 1])
    return escaped if len(escaped) <= limit else f"{escaped[:limit]}…"
