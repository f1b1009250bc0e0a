"""The GPU kernel (Triton) of a fused replay: a weight is read once, takes all its steps in registers, is written once.

Arithmetic and rounding are those of ``ops.triton``, step by step, so the weights are those of ``ops.add_noise_``.
"""

# ruff: noqa: N803, N806, SIM300  (Triton's dialect: constants in capitals)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..noise import Distribution, Key, Rounding
from ..ops import Mask
from ..ops.spec import Bernoulli, Magnitude
from ..ops.triton import MASKS, _accumulate, _box_muller, _philox, _quantize

LANES = 512  # counters of a program, four weights each; nothing crosses lanes
WARPS = 4
COLUMNS = tl.constexpr(5)
"""Of the table of tensors: address, numel, first counter of its first tile, counters and weights that lie before it."""

TYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@dataclasses.dataclass(frozen=True)
class Piece:
    """A contiguous tensor and its place.

    Args:
        flat: its weights.
        offset: global offset of the first.
        mask: which of them move; its key's step is overruled by each step's turn.
    """

    flat: Tensor
    offset: int
    mask: Mask | None


@dataclasses.dataclass(frozen=True)
class Steps:
    """What T steps do to a tensor: x ← round(decay[t]·x + Σₖ alphas[t, k]·u_k).

    Args:
        step: numbers of the steps, (T,) int64.
        turn: first step of the turn that each is in, (T,) int64.
        alphas: (T, probes) fp64.
        decay: (T,) fp64.
    """

    step: np.ndarray
    turn: np.ndarray
    alphas: np.ndarray
    decay: np.ndarray

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, rows: slice | np.ndarray) -> Steps:
        return Steps(self.step[rows], self.turn[rows], self.alphas[rows], self.decay[rows])


@triton.jit
def _draw(low, high, k0, k1, c2, c3, RADEMACHER: tl.constexpr):
    """Noise of the four elements of every counter, and their words."""
    w0, w1, w2, w3 = _philox(low, high, k0, k1, c2, c3)
    if RADEMACHER:
        u0 = 1.0 - 2.0 * (w0 >> 31).to(tl.float32)
        u1 = 1.0 - 2.0 * (w1 >> 31).to(tl.float32)
        u2 = 1.0 - 2.0 * (w2 >> 31).to(tl.float32)
        u3 = 1.0 - 2.0 * (w3 >> 31).to(tl.float32)
    else:
        u0, u1 = _box_muller(w0, w1)
        u2, u3 = _box_muller(w2, w3)
    return u0, u1, u2, u3, w0, w1, w2, w3


@triton.jit
def _masked(u, x, word, threshold, limit, MASK: tl.constexpr):
    """Noise where the mask keeps it; x is the weight before the step, word the mask's."""
    if MASK == 1:
        u = tl.where(tl.abs(x) <= threshold, u, 0.0)
    elif MASK == 2:
        u = tl.where(word <= limit, u, 0.0)
    return u


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
    i0 = (start - lead + tl.arange(0, LANES)) * 4 - shift
    i1, i2, i3 = i0 + 1, i0 + 2, i0 + 3
    x0 = tl.load(x_ptr + i0, mask=(i0 >= 0) & (i0 < n), other=0).to(WIDE)
    x1 = tl.load(x_ptr + i1, mask=(i1 >= 0) & (i1 < n), other=0).to(WIDE)
    x2 = tl.load(x_ptr + i2, mask=(i2 >= 0) & (i2 < n), other=0).to(WIDE)
    x3 = tl.load(x_ptr + i3, mask=(i3 >= 0) & (i3 < n), other=0).to(WIDE)
    for t in range(count):
        c2 = tl.load(step_ptr + t).to(tl.uint32)
        decay = tl.load(decay_ptr + t).to(WIDE)
        alpha = tl.load(alpha_ptr + t * PROBES).to(WIDE)
        u0, u1, u2, u3, w0, w1, w2, w3 = _draw(low, high, k0, k1, c2, c3, RADEMACHER)
        m0, m1, m2, m3_ = w0, w1, w2, w3
        if MASK == 2:
            m0, m1, m2, m3_ = _philox(low, high, k0, k1, tl.load(turn_ptr + t).to(tl.uint32), m3)
        a0 = _accumulate(x0 * decay, _masked(u0, x0, m0, threshold, limit, MASK), alpha)
        a1 = _accumulate(x1 * decay, _masked(u1, x1, m1, threshold, limit, MASK), alpha)
        a2 = _accumulate(x2 * decay, _masked(u2, x2, m2, threshold, limit, MASK), alpha)
        a3 = _accumulate(x3 * decay, _masked(u3, x3, m3_, threshold, limit, MASK), alpha)
        for k in range(1, PROBES):
            alpha = tl.load(alpha_ptr + t * PROBES + k).to(WIDE)
            u0, u1, u2, u3, _, _, _, _ = _draw(low, high, k0, k1, c2, (c3 + 16 * k).to(tl.uint32), RADEMACHER)
            a0 = _accumulate(a0, _masked(u0, x0, m0, threshold, limit, MASK), alpha)
            a1 = _accumulate(a1, _masked(u1, x1, m1, threshold, limit, MASK), alpha)
            a2 = _accumulate(a2, _masked(u2, x2, m2, threshold, limit, MASK), alpha)
            a3 = _accumulate(a3, _masked(u3, x3, m3_, threshold, limit, MASK), alpha)
        x0 = _quantize(a0, w0, DTYPE, STOCHASTIC, False).to(WIDE)
        x1 = _quantize(a1, w1, DTYPE, STOCHASTIC, False).to(WIDE)
        x2 = _quantize(a2, w2, DTYPE, STOCHASTIC, False).to(WIDE)
        x3 = _quantize(a3, w3, DTYPE, STOCHASTIC, False).to(WIDE)
    tl.store(x_ptr + i0, x0.to(DTYPE), mask=(i0 >= 0) & (i0 < n))
    tl.store(x_ptr + i1, x1.to(DTYPE), mask=(i1 >= 0) & (i1 < n))
    tl.store(x_ptr + i2, x2.to(DTYPE), mask=(i2 >= 0) & (i2 < n))
    tl.store(x_ptr + i3, x3.to(DTYPE), mask=(i3 >= 0) & (i3 < n))


def advance_(pieces: Sequence[Piece], steps: Steps, seed: int, distribution: Distribution, rounding: Rounding) -> None:
    """Take the steps on every piece, in one launch; pieces share device, dtype and kind of mask."""
    flat, mask = pieces[0].flat, pieces[0].mask
    key = Key(seed, 0)
    mask_key, limit = (mask.key, mask.limit) if isinstance(mask, Bernoulli) else (key, 0)
    table = np.empty((len(pieces), COLUMNS.value), np.int64)
    tiles = np.empty(len(pieces), np.int64)
    for i, piece in enumerate(pieces):
        counter, shift = divmod(piece.offset, 4)
        lead = counter % LANES  # so that no tile crosses a multiple of 2**32 counters
        table[i] = piece.flat.data_ptr(), piece.flat.numel(), counter - lead, lead, shift
        tiles[i] = -(-(lead * 4 + shift + piece.flat.numel()) // (LANES * 4))
    tensor = np.repeat(np.arange(len(pieces)), tiles)
    tile = np.arange(len(tensor)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    thresholds = [p.mask.threshold if isinstance(p.mask, Magnitude) else 0.0 for p in pieces]

    def there(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(flat.device)

    _advance[(len(tensor),)](
        there(tensor), there(tile), there(table), there(np.array(thresholds)), there(steps.step), there(steps.turn),
        there(steps.alphas), there(steps.decay), len(steps), *key.words[:2], key.words[3], mask_key.words[3], limit,
        DTYPE=TYPES[flat.dtype], PROBES=steps.alphas.shape[1], MASK=MASKS[type(mask)],
        RADEMACHER=distribution == Distribution.RADEMACHER,
        STOCHASTIC=rounding == Rounding.STOCHASTIC and flat.dtype.itemsize == 2,
        LANES=LANES, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
