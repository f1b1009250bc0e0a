"""Plain torch, as the models write it."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys.

    Args:
        query: (R, H, S, d).
        key: (R, K, S, d).
        cos: (1 or R, S, d).
        sin: (1 or R, S, d).

    Returns:
        Both, in their dtype and shape.
    """
    return _rotated(query, cos[:, None], sin[:, None]), _rotated(key, cos[:, None], sin[:, None])


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin
