"""Plain torch: one product after the other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from ..gate import Act
from ..gate.reference import gated


def project(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """The products of one input.

    Args:
        x: (…, k).
        weights: (nᵢ, k) each; three at most.
        biases: (nᵢ,) each, or None for all.

    Returns:
        (…, nᵢ) each.
    """
    return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def project_gated(x: Tensor, gate: Tensor, up: Tensor, act: Act) -> Tensor:
    """act(x Gᵀ)·(x Uᵀ): (…, k), (n, k), (n, k) → (…, n)."""
    return gated(F.linear(x, gate), F.linear(x, up), act)
