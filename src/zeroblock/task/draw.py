"""Random choices of examples, from the library's counter generator: the same on every machine."""

from __future__ import annotations

import numpy as np

from ..noise import Key
from ..ops import uniform

DATA = 4
"""The noise stream of data choices, separate from the streams of :mod:`zeroblock.noise`."""
EPOCH, DEMONSTRATION = range(2)
"""Probes of that stream, one for each use."""


def draw(k: int, n: int, key: Key) -> tuple[int, ...]:
    """Draw ``k`` of ``range(n)`` without repetition, in random order."""
    return tuple(int(i) for i in np.argsort(uniform(key, n), kind="stable")[:k])
