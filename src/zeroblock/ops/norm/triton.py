"""The GPU kernel (Triton): one program per row, which reads it once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import Scaling

MODES = {Scaling.ROUNDED: 0, Scaling.WIDE: 1, Scaling.SHIFTED: 2}


@triton.jit
def _rms_norm(x_ptr, w_ptr, out_ptr, n, eps, MODE: tl.constexpr, N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n
    at = tl.arange(0, N)
    inside = at < n
    x = tl.load(x_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + at, mask=inside, other=0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / n + eps)
    if MODE == 0:
        y = y.to(out_ptr.dtype.element_ty).to(tl.float32) * w.to(tl.float32)
    elif MODE == 1:
        y = y * w.to(tl.float32)
    else:
        y = y * (1.0 + w.to(tl.float32))
    tl.store(out_ptr + row + at, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _layer_norm(x_ptr, w_ptr, b_ptr, out_ptr, n, eps, N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n
    at = tl.arange(0, N)
    inside = at < n
    x = tl.load(x_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(inside, x - tl.sum(x, 0) / n, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / n + eps) * w + b
    tl.store(out_ptr + row + at, y.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, scaling: Scaling) -> Tensor:
    """See ``reference.py``."""
    x, weight = x.contiguous(), weight.contiguous()
    out, n = torch.empty_like(x), x.shape[-1]
    wide = triton.next_power_of_2(n)
    with torch.cuda.device_of(x):
        _rms_norm[(x.numel() // n,)](
            x, weight, out, n, eps, MODE=MODES[scaling], N=wide, num_warps=max(1, min(8, wide // 512))
        )
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See ``reference.py``."""
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    out, n = torch.empty_like(x), x.shape[-1]
    wide = triton.next_power_of_2(n)
    with torch.cuda.device_of(x):
        _layer_norm[(x.numel() // n,)](x, weight, bias, out, n, eps, N=wide, num_warps=max(1, min(8, wide // 512)))
    return out
