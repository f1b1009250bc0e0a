"""Plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import KEPT, LIMIT, NEW, NORMAL


def weigh(coeffs: Tensor, taken: Tensor, table: Tensor, block: int) -> Tensor:
    """See :func:`zeroblock.ops.weigh.weigh`."""
    rows = torch.stack([table[block], table[-1]])
    size = _size(rows)
    limit = torch.where(size > 0, LIMIT * size, math.inf)
    coeffs = torch.minimum(torch.maximum(coeffs, -limit), limit)
    mean = _sum(coeffs.abs()) / (coeffs != 0).sum(0, keepdim=True).clamp(min=1).double()
    seen = torch.cat([mean, torch.ones_like(mean)])
    after = torch.where(taken, KEPT * rows + NEW * seen, rows)
    table[block] = after[0]
    table[-1] = after[1]
    size = _size(after)
    return torch.where(size > 0, coeffs / size, 0.0)


def _sum(values: Tensor) -> Tensor:
    """(1,) the sum by adding halves, in an order that the host and every device share."""
    while len(values) > 1:
        half = len(values) // 2
        values = torch.cat([values[:half] + values[half : 2 * half], values[2 * half :]])
    return values


def _size(rows: Tensor) -> Tensor:
    """(1,) the running size of the rows (own, every); NaN where there is none yet."""
    own, every = rows[0], rows[1]
    return NORMAL * ((own[:1] + NEW * (every[:1] / every[1:])) / (own[1:] + NEW))
