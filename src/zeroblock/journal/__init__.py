"""The journal: what every step of a run was, in a few bytes a step.

Base weights and records rebuild the weights at any step, bit for bit, because
noise, masks, bases and rounding bits are functions of what a record and the
method already say.  ``docs/journal.md`` specifies the file.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..record import Record

if TYPE_CHECKING:
    from ..rerun import replay
    from .file import Contents, Journal, read
    from .header import Header
    from .identity import fingerprint
    from .share import export, load, unload

_HOME = {
    "Contents": "file",
    "Journal": "file",
    "read": "file",
    "Header": "header",
    "replay": ".rerun",
    "fingerprint": "identity",
    "export": "share",
    "load": "share",
    "unload": "share",
}
__all__ = ["Contents", "Header", "Journal", "Record", "export", "fingerprint", "load", "read", "replay", "unload"]


def __getattr__(name: str) -> Any:
    """Import on first use: the header knows the optimizer's parts, which know ``Record``."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
