"""The GPU kernel (Triton): tiles of keys that no query of a tile sees are never touched."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from ..shared.dispatch import tf32_allowed
from . import Packed


@triton.jit
def _packed(
    q_ptr, k_ptr, v_ptr, out_ptr, start_ptr, trunk_ptr, branch_ptr, until_ptr, position_ptr,
    root_ptr, q_row, q_head, q_at, k_row, k_head, k_at, v_row, v_head, v_at,
    length, heads, groups, scale, cap, window,
    CAP: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(length, M)
    tile = tl.program_id(0) % tiles
    r = tl.program_id(0) // tiles // heads
    h = tl.program_id(0) // tiles % heads
    at = tile * M + tl.arange(0, M)
    d = tl.arange(0, WIDE)
    inside = at < length
    start = tl.load(start_ptr + at, mask=inside, other=length).to(tl.int32)
    trunk = tl.load(trunk_ptr + at, mask=inside, other=0).to(tl.int32)
    branch = tl.load(branch_ptr + at, mask=inside, other=length).to(tl.int32)
    until = tl.load(until_ptr + at, mask=inside, other=-1).to(tl.int32)
    q_base = q_ptr + r.to(tl.int64) * q_row + h.to(tl.int64) * q_head
    k_base = k_ptr + r.to(tl.int64) * k_row + (h // groups).to(tl.int64) * k_head
    v_base = v_ptr + r.to(tl.int64) * v_row + (h // groups).to(tl.int64) * v_head
    fits = inside[:, None] & (d < D)[None, :]
    q = tl.load(q_base + at[:, None].to(tl.int64) * q_at + d[None, :], mask=fits, other=0.0)
    if WINDOW:
        here = tl.load(position_ptr + at, mask=inside, other=0).to(tl.int32)
    top = tl.full([M], -float("inf"), tl.float32)
    norm = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, WIDE], tl.float32)
    root = tl.load(root_ptr).to(tl.int32)
    first = tl.maximum(tl.min(start, 0), root)
    others = tl.maximum(tl.max(until, 0) + 1 - first, 0)
    for n in range(0, root + others, N):  # the keys of the root, then those from ``first`` on
        slot = n + tl.arange(0, N)
        key = tl.where(slot < root, slot, slot - root + first)
        there = (key < length)[:, None] & (d < D)[None, :]
        k = tl.load(k_base + key[:, None].to(tl.int64) * k_at + d[None, :], mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if CAP:
            scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)
        column = key[None, :]
        seen = (column >= start[:, None]) & (column < trunk[:, None]) | (column >= branch[:, None])
        seen = (seen | (column < root)) & (column <= until[:, None])
        if WINDOW:
            behind = tl.load(position_ptr + key, mask=key < length, other=0).to(tl.int32)
            seen = seen & (tl.abs(here[:, None] - behind[None, :]) < window)
        scores = tl.where(seen, scores, -float("inf"))
        above = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(above == -float("inf"), 0.0, above)  # a query that has seen nothing yet
        shrink = tl.exp(top - base)
        weights = tl.exp(scores - base[:, None])
        norm = norm * shrink + tl.sum(weights, 1)
        v = tl.load(v_base + key[:, None].to(tl.int64) * v_at + d[None, :], mask=there, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top = above
    out = acc / tl.where(norm == 0.0, 1.0, norm)[:, None]
    place = (r.to(tl.int64) * length + at[:, None]) * heads + h
    tl.store(out_ptr + place * D + d[None, :], out.to(out_ptr.dtype.element_ty), mask=fits)


def packed(
    query: Tensor, key: Tensor, value: Tensor, row: Packed, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Attention of a packed row.

    Args:
        query: (R, H, S, d).
        key: (R, K, S, d), K dividing H.
        value: (R, K, S, e).
        row: says which of the S tokens see which.
        scale: factor on the scores.
        window: keys at least this many positions away are not seen.
        softcap: c·tanh(score/c).

    Returns:
        (R, S, H, e), contiguous.
    """
    wide, size = value.shape[-1], max(query.shape[-1], value.shape[-1])
    if query.shape[-1] != wide:
        query, key, value = (F.pad(x, (0, size - x.shape[-1])) for x in (query, key, value))  # zeros change no score
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    rows, heads, length, _ = query.shape
    out = torch.empty(rows, length, heads, size, dtype=query.dtype, device=query.device)
    single = query.dtype == torch.float32
    exact = single and not tf32_allowed()
    m, n = (32, 32) if single else (64, 64)
    with torch.cuda.device_of(query):
        _packed[(triton.cdiv(length, m) * rows * heads,)](  # one axis: the second of CUDA's ends at 65,535
            query, key, value, out, row.start, row.trunk, row.branch, row.until, row.positions,
            row.root, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            length, heads, heads // key.shape[1], scale, softcap or 0.0, window or 0,
            CAP=softcap is not None, WINDOW=window is not None, D=size, WIDE=max(16, triton.next_power_of_2(size)),
            M=m, N=n, PRECISION="ieee" if exact else "tf32", num_warps=4,
        )  # fmt: skip
    return out[..., :wide].contiguous()
