"""What can go wrong, in words that name the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ZeroBlockError(Exception):
    """An error of the user's making; the command line prints it in one line."""


class ZeroBlockWarning(UserWarning):
    """Something the user should know that does not stop the run."""


def unknown(kind: str, name: str, known: Iterable[str]) -> ZeroBlockError:
    """The error for a misspelt name: says the nearest one, or lists them all.

    >>> print(unknown("method", "mezo_bdc", ["mezo", "mezo_bcd"]))
    unknown method 'mezo_bdc'; did you mean 'mezo_bcd'?
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose from: {', '.join(known)}"
    return ZeroBlockError(f"unknown {kind} {name!r}; {hint}")


def shown(text: object, limit: int = 200) -> str:
    r"""Text from a file of somebody else's, safe to print: one line, without control characters, of bounded length.

    >>> shown("\x1b[2Jred\nline")
    '\\x1b[2Jred\\nline'
    """
    escaped = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text)[: limit + 1])
    return escaped if len(escaped) <= limit else f"{escaped[:limit]}…"
