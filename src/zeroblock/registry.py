"""Registries: one per kind of part.  Joining one is joining the library.

A registered part can be named on the command line, is written to and rebuilt from
journals, appears in the tables of the documentation, and is run by the generic tests.
"""

from __future__ import annotations

import re
from typing import TypeVar

from .errors import unknown

Part = TypeVar("Part", bound=type)


class Registry(dict[str, type]):
    """Parts of one kind by the name that the command line uses.

    >>> parts = Registry("rule")
    >>> class LineSearch: ...
    >>> LineSearch is parts.register(LineSearch)
    True
    >>> list(parts)
    ['line-search']

    Args:
        kind: the name of such a part in messages: "schedule", "subspace", "estimator" or "rule".
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def register(self, cls: Part) -> Part:
        """Enter a class under its name in lower case with hyphens; usable as a decorator."""
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()
        other = self.get(name, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"there is another {self.kind} called {name!r}, of {other.__module__}: rename this one")
        self[name] = cls
        return cls

    def classes(self) -> dict[str, type]:
        """The parts by the names of their classes, which journals use."""
        return {cls.__name__: cls for cls in self.values()}

    def named(self, name: str) -> type:
        """The part with a name; the error for an unknown name suggests the nearest."""
        if name not in self:
            raise unknown(self.kind, name, self)
        return self[name]
