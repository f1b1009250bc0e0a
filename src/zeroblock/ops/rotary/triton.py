"""The GPU kernel (Triton): one program per token, which rotates all heads; equal to ``reference.py`` to the bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate_heads(
    x_ptr, out_ptr, x_base, x_head, out_base, heads, half, c0, s0, c1, s1, HEADS: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    h = tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, HALF)[None, :]
    inside = (h < heads) & (at < half)
    a = tl.load(x_ptr + x_base + h.to(tl.int64) * x_head + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + x_base + h.to(tl.int64) * x_head + half + at, mask=inside, other=0.0).to(tl.float32)
    # rounded three times, as torch does
    left = (a * c0).to(DTYPE).to(tl.float32) - (b * s0).to(DTYPE).to(tl.float32)
    right = (b * c1).to(DTYPE).to(tl.float32) + (a * s1).to(DTYPE).to(tl.float32)
    place = out_base + h * 2 * half + at
    tl.store(out_ptr + place, left.to(DTYPE), mask=inside)
    tl.store(out_ptr + place + half, right.to(DTYPE), mask=inside)


@triton.jit
def _rotate(
    q_ptr, k_ptr, q_out, k_out, cos_ptr, sin_ptr,
    q_row, q_head, q_at, k_row, k_head, k_at, cos_row, sin_row, cos_at, sin_at, length, q_heads, k_heads, half,
    Q: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    r = (tl.program_id(0) // length).to(tl.int64)
    s = (tl.program_id(0) % length).to(tl.int64)
    at = tl.arange(0, HALF)[None, :]
    inside = at < half
    cos = cos_ptr + r * cos_row + s * cos_at + at
    sin = sin_ptr + r * sin_row + s * sin_at + at
    c0 = tl.load(cos, mask=inside, other=0.0).to(tl.float32)
    c1 = tl.load(cos + half, mask=inside, other=0.0).to(tl.float32)
    s0 = tl.load(sin, mask=inside, other=0.0).to(tl.float32)
    s1 = tl.load(sin + half, mask=inside, other=0.0).to(tl.float32)
    place = (r * length + s) * 2 * half
    _rotate_heads(q_ptr, q_out, r * q_row + s * q_at, q_head, place * q_heads, q_heads, half, c0, s0, c1, s1, Q, HALF)
    _rotate_heads(k_ptr, k_out, r * k_row + s * k_at, k_head, place * k_heads, k_heads, half, c0, s0, c1, s1, K, HALF)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See ``reference.py``; the results lie in memory as (R, S, H, d)."""
    query, key, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, cos, sin))
    rows, heads, length, size = query.shape
    outs = [torch.empty(rows, length, x.shape[1], size, dtype=x.dtype, device=x.device) for x in (query, key)]
    with torch.cuda.device_of(query):
        _rotate[(rows * length,)](
            query, key, *outs, cos, sin, *query.stride()[:3], *key.stride()[:3],
            *(x.stride(0) if x.shape[0] > 1 else 0 for x in (cos, sin)), cos.stride(1), sin.stride(1),
            length, heads, key.shape[1], size // 2,
            Q=triton.next_power_of_2(heads), K=triton.next_power_of_2(key.shape[1]),
            HALF=triton.next_power_of_2(size // 2), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return outs[0].transpose(1, 2), outs[1].transpose(1, 2)
