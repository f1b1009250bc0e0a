"""The GPU kernels: rounding and joining in Triton, the product is torch's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import EIGHT, LARGEST, TINY, Rounded

PAD = 256
"""Buffers of scales are padded to multiples of this: torch's row-wise product was seen to read past them (#133334)."""
COLUMNS = 1024
"""Columns that a program of ``_join`` joins."""


@triton.jit
def _rounded(x_ptr, out_ptr, scale_ptr, n, tokens, LARGEST: tl.constexpr, TINY: tl.constexpr, N: tl.constexpr):
    """One program per row, which reads it once; the first point's row is subtracted from rows from ``tokens`` on."""
    row = tl.program_id(0)
    column = tl.arange(0, N)
    inside = column < n
    at = row.to(tl.int64) * n + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if row >= tokens:
        first = (row % tokens).to(tl.int64) * n + column
        x -= tl.load(x_ptr + first, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), 0), TINY)
    if tl.max((x != x).to(tl.int32), 0) > 0:  # maxima pass over NaN
        largest = float("nan")
    tl.store(scale_ptr + row, largest * (1 / LARGEST))
    factor = tl.div_rn(tl.full((1,), LARGEST, tl.float32), tl.full((1,), 0.0, tl.float32) + largest)
    tl.store(out_ptr + at, (x * factor).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _join(y_ptr, bias_ptr, n, step, points, BIAS: tl.constexpr, N: tl.constexpr):
    """One program per token and piece of columns, for all points, which lie ``step`` numbers apart."""
    column = tl.program_id(1) * N + tl.arange(0, N)
    inside = column < n
    at = tl.program_id(0).to(tl.int64) * n + column
    first = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    bias = tl.zeros((N,), tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, (first + bias).to(y_ptr.dtype.element_ty), mask=inside)
    for _ in range(1, points):
        at += step
        y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32) + first + bias
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def rounded(x: Tensor, tokens: int = 0) -> Rounded:
    """See ``reference.py``."""
    x = x.contiguous()
    rows, n = x.shape
    out = torch.empty(x.shape, dtype=EIGHT, device=x.device)
    scale = torch.empty(-(-rows // PAD) * PAD, dtype=torch.float32, device=x.device)[:rows]
    wide = triton.next_power_of_2(n)
    with torch.cuda.device_of(x):
        _rounded[(rows,)](
            x, out, scale, n, tokens or rows, LARGEST=LARGEST, TINY=TINY, N=wide,
            num_warps=max(1, min(16, wide // 1024)),
        )  # fmt: skip
    return out, scale[:, None]


def product(x: Rounded, weight: Rounded) -> Tensor:
    """See ``reference.py``; fast accumulation would keep some 14 bits of every sum."""
    return torch._scaled_mm(
        x[0], weight[0].t(), scale_a=x[1], scale_b=weight[1].t(), out_dtype=torch.bfloat16, use_fast_accum=False
    )


def join_(y: Tensor, tokens: int, bias: Tensor | None) -> Tensor:
    """See ``reference.py``."""
    n = y.shape[1]
    points = len(y) // tokens
    if points == 1 and bias is None:
        return y
    with torch.cuda.device_of(y):
        _join[(tokens, triton.cdiv(n, COLUMNS))](
            y, y if bias is None else bias.contiguous(), n, tokens * n, points, BIAS=bias is not None, N=COLUMNS
        )
    return y
