"""The product of a gated layer, act(a)·b: one kernel instead of two."""

from __future__ import annotations

import enum


class Act(enum.Enum):
    """The activation of the gate."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
