"""Plain torch, as the models write it."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from . import Act


def gated(gate: Tensor, up: Tensor, act: Act) -> Tensor:
    """act(gate)·up, elementwise; (…, n) each, in one dtype."""
    return (F.silu(gate) if act is Act.SILU else F.gelu(gate, approximate="tanh")) * up
