"""Plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from . import EIGHT, LARGEST, TINY, Rounded


def rounded(x: Tensor, tokens: int = 0) -> Rounded:
    """Round rows to 8 bits, each with its own scale.

    Args:
        x: (rows, n).
        tokens: rows per point: the first point's rows are rounded as they are, every other row as its difference from
            the first point's. 0 rounds all rows as they are.

    Returns:
        The numbers and their scales; number times scale is the rounded row.
    """
    wide = x.float()
    if tokens:
        points = wide.view(-1, tokens, x.shape[1])
        wide = torch.cat([points[:1], points[1:] - points[:1]]).view(x.shape)
    largest = wide.abs().amax(1, keepdim=True).clamp(min=TINY)
    factor = torch.full_like(largest, LARGEST) / largest  # torch divides a number by a tensor with two roundings
    return (wide * factor).to(EIGHT), largest * (1 / LARGEST)


def product(x: Rounded, weight: Rounded) -> Tensor:
    """(m, k) and (n, k), each with its scales → (m, n) in bf16: x Wᵀ, summed in fp32."""
    exact = F.linear(x[0].float(), weight[0].float())
    return (exact * x[1] * weight[1].T).bfloat16()


def join_(y: Tensor, tokens: int, bias: Tensor | None) -> Tensor:
    """Add the first point's product to that of every other point, and the bias to all.

    Args:
        y: (points · tokens, n), changed in place; every sum is computed in fp32 and rounded once.
        tokens: rows per point.
        bias: (n,).
    """
    points = y.view(-1, tokens, y.shape[1])
    wide = points.float()
    wide[1:] += wide[:1].clone()
    points.copy_(wide if bias is None else wide + bias.float())
    return y
