"""Products of 8-bit numbers (e4m3) in which every point after the first enters as its difference from the first.

    y₀ = Q(x₀) Q(W)ᵀ + b        yᵣ = y₀ + Q(xᵣ - x₀) Q(W)ᵀ        for the points r > 0

Q rounds a row to 8 bits with its own scale, which maps the row's largest magnitude to the largest number of e4m3.
A coefficient is a small difference of two losses.  A difference that is rounded by itself keeps its leading bits, and
the error of the first point is the same at all points.

    rounded   rows → 8-bit numbers and their scales
    product   of two matrices of such rows
    join_     adds the first point and the bias, in place
"""

from __future__ import annotations

import torch
from torch import Tensor

EIGHT = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of e4m3."""
TINY = 1e-30
"""Rows whose largest magnitude is below this are scaled as if it were this, so that no scale is zero."""

Rounded = tuple[Tensor, Tensor]
"""(rows, n) in e4m3, and (rows, 1) the scales in fp32."""
