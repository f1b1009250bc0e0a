"""The GPU kernels (Triton): a weight is read once, takes all its steps in registers, and is written once.

Arithmetic and rounding are those of ``ops.noise`` and ``ops.outer``, step by step.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ...noise import BASIS, ROUNDING, Distribution, Key, RandomMask, Rounding, SmallMask
from ..shared.triton import MASKS, accumulate, box_muller, philox, quantize
from .group import Matrix, Pieces, Steps

LANES = 512  # counters of a program, four weights each; nothing crosses lanes
WARPS = 4
COLUMNS = tl.constexpr(5)
"""The table's columns per tensor: address, numel, its first tile's first counter, counters and weights before it."""

TYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@triton.jit
def _draw(low, high, k0, k1, c2, c3, RADEMACHER: tl.constexpr):
    """Noise of the four elements of every counter, and their words."""
    w0, w1, w2, w3 = philox(low, high, k0, k1, c2, c3)
    if RADEMACHER:
        u0 = 1.0 - 2.0 * (w0 >> 31).to(tl.float32)
        u1 = 1.0 - 2.0 * (w1 >> 31).to(tl.float32)
        u2 = 1.0 - 2.0 * (w2 >> 31).to(tl.float32)
        u3 = 1.0 - 2.0 * (w3 >> 31).to(tl.float32)
    else:
        u0, u1 = box_muller(w0, w1)
        u2, u3 = box_muller(w2, w3)
    return u0, u1, u2, u3, w0, w1, w2, w3


@triton.jit
def _masked(u, x, word, threshold, limit, MASK: tl.constexpr):
    """Noise where the mask keeps it; x is the weight before the step, word the mask's."""
    if MASK == 1:
        u = tl.where(tl.abs(x) <= threshold, u, 0.0)
    elif MASK == 2:
        u = tl.where(word <= limit, u, 0.0)
    return u


@triton.jit
def _place(first, lead, shift, n, LANES: tl.constexpr):
    """Index of the first of the four elements of every counter of a tile, and which of the four exist."""
    i = (first - lead + tl.arange(0, LANES)) * 4 - shift
    return i, _within(i, n), _within(i + 1, n), _within(i + 2, n), _within(i + 3, n)


@triton.jit
def _within(i, n):
    return (i >= 0) & (i < n)


@triton.jit
def _load(ptr, in0, in1, in2, in3, WIDE: tl.constexpr):
    """The four elements of every counter."""
    x0, x1 = tl.load(ptr, mask=in0, other=0), tl.load(ptr + 1, mask=in1, other=0)
    x2, x3 = tl.load(ptr + 2, mask=in2, other=0), tl.load(ptr + 3, mask=in3, other=0)
    return x0.to(WIDE), x1.to(WIDE), x2.to(WIDE), x3.to(WIDE)


@triton.jit
def _store(ptr, x0, x1, x2, x3, in0, in1, in2, in3, DTYPE: tl.constexpr):
    tl.store(ptr, x0.to(DTYPE), mask=in0)
    tl.store(ptr + 1, x1.to(DTYPE), mask=in1)
    tl.store(ptr + 2, x2.to(DTYPE), mask=in2)
    tl.store(ptr + 3, x3.to(DTYPE), mask=in3)


@triton.jit(do_not_specialize=["count", "k0", "k1", "c3", "m3", "limit"])
def _advance(
    tensor_ptr, tile_ptr, table_ptr, threshold_ptr, step_ptr, turn_ptr, alpha_ptr, decay_ptr,
    count, k0, k1, c3, m3, limit,
    DTYPE: tl.constexpr, PROBES: tl.constexpr, MASK: tl.constexpr, RADEMACHER: tl.constexpr, STOCHASTIC: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    k0, k1, c3, m3 = k0.to(tl.uint32), k1.to(tl.uint32), c3.to(tl.uint32), m3.to(tl.uint32)
    limit = limit.to(tl.uint32)
    tensor = tl.load(tensor_ptr + tl.program_id(0))
    row = table_ptr + tensor * COLUMNS
    x_ptr = tl.load(row).to(tl.pointer_type(DTYPE))
    n, base, lead, shift = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    threshold = tl.load(threshold_ptr + tensor).to(WIDE)
    start = tl.load(tile_ptr + tl.program_id(0)) * LANES
    low = (base + start).to(tl.uint32) + tl.arange(0, LANES).to(tl.uint32)
    high = ((base + start) >> 32).to(tl.uint32)
    i, in0, in1, in2, in3 = _place(start, lead, shift, n, LANES)
    x0, x1, x2, x3 = _load(x_ptr + i, in0, in1, in2, in3, WIDE)
    for t in range(count):
        c2 = tl.load(step_ptr + t).to(tl.uint32)
        decay = tl.load(decay_ptr + t).to(WIDE)
        alpha = tl.load(alpha_ptr + t * PROBES).to(WIDE)
        u0, u1, u2, u3, w0, w1, w2, w3 = _draw(low, high, k0, k1, c2, c3, RADEMACHER)
        m0, m1, m2, m3_ = w0, w1, w2, w3
        if MASK == 2:
            m0, m1, m2, m3_ = philox(low, high, k0, k1, tl.load(turn_ptr + t).to(tl.uint32), m3)
        a0 = accumulate(x0 * decay, _masked(u0, x0, m0, threshold, limit, MASK), alpha)
        a1 = accumulate(x1 * decay, _masked(u1, x1, m1, threshold, limit, MASK), alpha)
        a2 = accumulate(x2 * decay, _masked(u2, x2, m2, threshold, limit, MASK), alpha)
        a3 = accumulate(x3 * decay, _masked(u3, x3, m3_, threshold, limit, MASK), alpha)
        for k in range(1, PROBES):
            alpha = tl.load(alpha_ptr + t * PROBES + k).to(WIDE)
            u0, u1, u2, u3, _, _, _, _ = _draw(low, high, k0, k1, c2, (c3 + 16 * k).to(tl.uint32), RADEMACHER)
            a0 = accumulate(a0, _masked(u0, x0, m0, threshold, limit, MASK), alpha)
            a1 = accumulate(a1, _masked(u1, x1, m1, threshold, limit, MASK), alpha)
            a2 = accumulate(a2, _masked(u2, x2, m2, threshold, limit, MASK), alpha)
            a3 = accumulate(a3, _masked(u3, x3, m3_, threshold, limit, MASK), alpha)
        x0 = quantize(a0, w0, DTYPE, STOCHASTIC, False).to(WIDE)
        x1 = quantize(a1, w1, DTYPE, STOCHASTIC, False).to(WIDE)
        x2 = quantize(a2, w2, DTYPE, STOCHASTIC, False).to(WIDE)
        x3 = quantize(a3, w3, DTYPE, STOCHASTIC, False).to(WIDE)
    _store(x_ptr + i, x0, x1, x2, x3, in0, in1, in2, in3, DTYPE)


@triton.jit(do_not_specialize=["fold", "n", "base", "lead", "shift", "k0", "k1", "c3"])
def _fill(
    out_ptr, step_ptr, alpha_ptr, fold, n, base, lead, shift, k0, k1, c3,
    PROBES: tl.constexpr, RADEMACHER: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """out[f] ← Σₜ Σₖ alpha[t, k]·u_k of step t, over the steps t of fold f, n of them: a row of programs per fold."""
    f = tl.program_id(1)
    start = tl.program_id(0).to(tl.int64) * LANES
    low = (base + start).to(tl.uint32) + tl.arange(0, LANES).to(tl.uint32)
    high = ((base + start) >> 32).to(tl.uint32)
    k0, k1, c3 = k0.to(tl.uint32), k1.to(tl.uint32), c3.to(tl.uint32)
    zero = tl.zeros([LANES], tl.float32)
    a0, a1, a2, a3 = zero, zero, zero, zero
    for t in range(f * fold, (f + 1) * fold):
        c2 = tl.load(step_ptr + t).to(tl.uint32)
        for k in range(PROBES):
            alpha = tl.load(alpha_ptr + t * PROBES + k).to(tl.float32)
            u0, u1, u2, u3, _, _, _, _ = _draw(low, high, k0, k1, c2, (c3 + 16 * k).to(tl.uint32), RADEMACHER)
            a0, a1 = accumulate(a0, u0, alpha), accumulate(a1, u1, alpha)
            a2, a3 = accumulate(a2, u2, alpha), accumulate(a3, u3, alpha)
    i, in0, in1, in2, in3 = _place(start, lead, shift, n, LANES)
    _store(out_ptr + f.to(tl.int64) * n + i, a0, a1, a2, a3, in0, in1, in2, in3, tl.float32)


@triton.jit
def _outer(x, z_ptr, v_ptr, inside, decay, RANK: tl.constexpr):
    """decay·x + z Vᵀ, the products summed in order, each rounded."""
    delta = tl.load(z_ptr, mask=inside, other=0) * tl.load(v_ptr, mask=inside, other=0)
    for r in tl.static_range(1, RANK):
        delta = delta + tl.load(z_ptr + r, mask=inside, other=0) * tl.load(v_ptr + r, mask=inside, other=0)
    return accumulate(x * decay, delta, 1.0)


@triton.jit(do_not_specialize=["count", "n", "base", "lead", "shift", "width", "height", "k0", "k1", "c3"])
def _advance_outer(
    x_ptr, z_ptr, v_ptr, step_ptr, turn_ptr, decay_ptr, count, n, base, lead, shift, width, height, k0, k1, c3,
    RANK: tl.constexpr, STOCHASTIC: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    start = tl.program_id(0).to(tl.int64) * LANES
    low = (base + start).to(tl.uint32) + tl.arange(0, LANES).to(tl.uint32)
    high = ((base + start) >> 32).to(tl.uint32)
    k0, k1, c3 = k0.to(tl.uint32), k1.to(tl.uint32), c3.to(tl.uint32)
    i, in0, in1, in2, in3 = _place(start, lead, shift, n, LANES)
    x0, x1, x2, x3 = _load(x_ptr + i, in0, in1, in2, in3, WIDE)
    w0, w1, w2, w3 = low, low, low, low
    row0, row1, row2, row3 = i // width, (i + 1) // width, (i + 2) // width, (i + 3) // width
    z0, z1, z2, z3 = row0 * RANK, row1 * RANK, row2 * RANK, row3 * RANK  # here: the compiler would divide at every step
    v0, v1 = (i - row0 * width) * RANK, (i + 1 - row1 * width) * RANK
    v2, v3 = (i + 2 - row2 * width) * RANK, (i + 3 - row3 * width) * RANK
    for t in range(count):
        v = v_ptr + tl.load(turn_ptr + t) * width * RANK
        decay = tl.load(decay_ptr + t).to(WIDE)
        if STOCHASTIC:
            w0, w1, w2, w3 = philox(low, high, k0, k1, tl.load(step_ptr + t).to(tl.uint32), c3)
        x0 = quantize(_outer(x0, z_ptr + z0, v + v0, in0, decay, RANK), w0, DTYPE, STOCHASTIC, False).to(WIDE)
        x1 = quantize(_outer(x1, z_ptr + z1, v + v1, in1, decay, RANK), w1, DTYPE, STOCHASTIC, False).to(WIDE)
        x2 = quantize(_outer(x2, z_ptr + z2, v + v2, in2, decay, RANK), w2, DTYPE, STOCHASTIC, False).to(WIDE)
        x3 = quantize(_outer(x3, z_ptr + z3, v + v3, in3, decay, RANK), w3, DTYPE, STOCHASTIC, False).to(WIDE)
        z_ptr += height * RANK
    _store(x_ptr + i, x0, x1, x2, x3, in0, in1, in2, in3, DTYPE)


def _tiles(offset: int, numel: int) -> tuple[int, tuple[int, int, int]]:
    """The number of a tensor's tiles; the first one's counter, and its counters and weights that precede the tensor."""
    counter, shift = divmod(offset, 4)
    lead = counter % LANES  # so that no tile crosses a multiple of 2**32 counters
    return -(-(lead * 4 + shift + numel) // (LANES * 4)), (counter - lead, lead, shift)


def advance_matrix_(matrix: Matrix, steps: Steps, rounding: Rounding) -> None:
    """Take the steps, whole folds of them; z of every fold and V of every turn are drawn beforehand."""
    flat, rank, width, key = matrix.flat, matrix.rank, matrix.width, matrix.draw.key
    height = matrix.numel // width
    last = steps[matrix.fold - 1 :: matrix.fold]
    turns, turn = np.unique(last.turn, return_inverse=True)

    def draw(key: Key, at: np.ndarray, alphas: np.ndarray, fold: int, rows: int) -> Tensor:
        out = torch.empty((len(at) // fold, rows * rank), dtype=torch.float32, device=flat.device)
        tiles, place = _tiles(matrix.draw.offset, rows * rank)
        _fill[(tiles, len(out))](
            out, _on_device(at, flat), _on_device(alphas, flat), fold, rows * rank, *place, *key.words[:2],
            key.words[3], PROBES=alphas.shape[1], RADEMACHER=matrix.draw.distribution == Distribution.RADEMACHER,
            LANES=LANES, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        return out

    z = draw(key, steps.step, steps.alphas, matrix.fold, height)
    v = draw(key.to(stream=BASIS), turns, np.ones((len(turns), 1)), 1, width)
    tiles, place = _tiles(matrix.draw.offset, matrix.numel)
    _advance_outer[(tiles,)](
        flat, z, v, _on_device(last.step, flat), _on_device(turn, flat), _on_device(last.decay, flat), len(last),
        matrix.numel, *place, width, height, *key.words[:2], key.to(stream=ROUNDING).words[3],
        RANK=rank, STOCHASTIC=rounding == Rounding.STOCHASTIC and flat.dtype.itemsize == 2,
        LANES=LANES, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def advance_pieces_(group: Pieces, steps: Steps, rounding: Rounding) -> None:
    """Take the steps on every piece, in one launch."""
    pieces, flat, draw = group.pieces, group.flat, group.pieces[0].draw
    key, mask = draw.key, draw.mask
    mask_key, limit = (mask.key, mask.limit) if isinstance(mask, RandomMask) else (key, 0)
    table = np.empty((len(pieces), COLUMNS.value), np.int64)
    tiles = np.empty(len(pieces), np.int64)
    thresholds = np.zeros(len(pieces))
    for i, piece in enumerate(pieces):
        tiles[i], place = _tiles(piece.draw.offset, piece.flat.numel())
        table[i] = piece.flat.data_ptr(), piece.flat.numel(), *place
        if isinstance(piece.draw.mask, SmallMask):
            thresholds[i] = piece.draw.mask.threshold
    tensor = np.repeat(np.arange(len(pieces)), tiles)
    tile = np.arange(len(tensor)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    tables = (tensor, tile, table, thresholds, steps.step, steps.turn, steps.alphas, steps.decay)
    _advance[(len(tensor),)](
        *(_on_device(values, flat) for values in tables),
        len(steps), *key.words[:2], key.words[3], mask_key.words[3], limit,
        DTYPE=TYPES[flat.dtype], PROBES=steps.alphas.shape[1], MASK=MASKS[type(mask)],
        RADEMACHER=draw.distribution == Distribution.RADEMACHER,
        STOCHASTIC=rounding == Rounding.STOCHASTIC and flat.dtype.itemsize == 2,
        LANES=LANES, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def _on_device(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)
