"""Coefficients in units of their running size, on the device: one kernel in place of forty of plain torch.

All versions agree to the bit, and with the host's arithmetic in ``rule/normalized.py``, which says what it is for.
"""

from __future__ import annotations

import math

from torch import Tensor

from ..shared.dispatch import backend

KEPT = 0.95
"""Share of a running size that stays after a visit: it remembers some twenty visits of its block."""
NEW = 1 - KEPT
NORMAL = math.sqrt(math.pi / 2)
"""Root mean square over mean magnitude of normal numbers."""
LIMIT = 3.0
"""Coefficients are clamped to so many running sizes: one freak of 187 among coefficients of 2 has ended a run."""
MAX_PROBES = 1024
"""Coefficients up to which one program takes them."""


def weigh(coeffs: Tensor, taken: Tensor, table: Tensor, block: int) -> Tensor:
    """The coefficients in units of their running size, which they change.

    Args:
        coeffs: (probes,) fp64.
        taken: (1,) bool, false where the table stays as it is.
        table: (blocks + 1, 2) fp64, contiguous: s and w of every block and, last, of all together; updated.
        block: index of the active block.

    Returns:
        (probes,) fp64; 0 where there is no size.
    """
    probes = len(coeffs)
    halves = probes & (probes - 1) == 0 and probes <= MAX_PROBES  # what a kernel can halve without a rest: 1, 2, 4, …
    plain = not (coeffs.is_cuda and halves)
    result: Tensor = backend("weigh", "reference" if plain else "cuda").weigh(coeffs, taken, table, block)
    return result
