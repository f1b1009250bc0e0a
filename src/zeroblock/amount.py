"""Amounts of memory, as people write them."""

from __future__ import annotations

import re

from .errors import ZeroBlockError

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
MAX_BYTES = 1 << 63


def nbytes(text: str) -> int:
    """The number of bytes in an amount of memory.

    >>> nbytes("8GB"), nbytes("1.5 GiB")
    (8000000000, 1610612736)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", text, re.IGNORECASE)
    if match is None or match[2].upper() not in UNITS:
        raise ZeroBlockError(f"an amount of memory is a number with a unit, such as 8GB or 500MB, got {text!r}")
    found = float(match[1]) * UNITS[match[2].upper()]
    if not 1 <= found < MAX_BYTES:
        raise ZeroBlockError(f"an amount of memory must be positive, and less than 2**63 bytes, got {text[:40]!r}")
    return int(found)


def words(count: float) -> str:
    """An amount of memory as people read it.

    >>> words(25.2e9), words(629_145_600), words(12_300_000), words(4096)
    ('25.20 GB', '0.63 GB', '12.30 MB', '4.10 KB')
    """
    unit = next((unit for unit in ("GB", "MB") if count >= 0.1 * UNITS[unit]), "KB")
    return f"{count / UNITS[unit]:.2f} {unit}"
