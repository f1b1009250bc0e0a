"""The journal: every step of a run, in a few bytes each.

Base weights and records rebuild the weights of any step, bit for bit, because noise, masks, bases and rounding bits
are functions of values that the records and the header hold.  ``docs/journal.md`` specifies the file.
"""

from __future__ import annotations

from ..record import Record
from ..rerun import replay
from .format import Contents, Records, read
from .header import Header
from .identity import fingerprint
from .share import export, load, unload
from .writer import Journal

__all__ = [
    "Contents",
    "Header",
    "Journal",
    "Record",
    "Records",
    "export",
    "fingerprint",
    "load",
    "read",
    "replay",
    "unload",
]
