"""Coefficients in units of their running size, on the device: one kernel instead of forty in plain torch.

All versions agree to the bit, and with the host's arithmetic in ``rule/normalized.py``, which explains the purpose.
"""

from __future__ import annotations

import math

from torch import Tensor

from ..shared.dispatch import backend

KEPT = 0.95
"""Share of a running size that stays after a visit: it remembers about twenty visits of its block."""
NEW = 1 - KEPT
NORMAL = math.sqrt(math.pi / 2)
"""Root mean square over mean magnitude of normal numbers."""
LIMIT = 3.0
"""Coefficients are clamped to this many running sizes: one outlier of 187 among coefficients of 2 has ended a run."""
MAX_PROBES = 1024
"""The most coefficients that one program takes."""


def weigh(coeffs: Tensor, taken: Tensor, table: Tensor, block: int) -> Tensor:
    """The coefficients in units of their running size, which they update.

    Args:
        coeffs: (probes,) fp64.
        taken: (1,) bool, false if the table stays as it is.
        table: (blocks + 1, 2) fp64, contiguous: s and w of every block and, last, of all together; updated.
        block: index of the active block.

    Returns:
        (probes,) fp64; 0 if there is no size yet.
    """
    probes = len(coeffs)
    halves = probes & (probes - 1) == 0 and probes <= MAX_PROBES  # a kernel can halve these evenly: 1, 2, 4, …
    plain = not (coeffs.is_cuda and halves)
    result: Tensor = backend("weigh", "reference" if plain else "cuda").weigh(coeffs, taken, table, block)
    return result
