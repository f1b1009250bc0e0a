"""The GPU kernels (Triton) of a fused replay: a weight is read once, takes all its steps in registers, is written once.

Arithmetic and rounding are those of ``ops.triton``, step by step, so the weights are those of ``ops.add_noise_``,
and of ``ops.fill_`` and ``ops.add_outer_`` for matrices that move in a low-rank subspace.
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

from ..noise import BASIS, ROUNDING, Distribution, Key, Rounding
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
    """What T steps do to a tensor: x ← round(decay[t]·x + P Σₖ alphas[t, k]·u_k).

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

    @property
    def moving(self) -> Steps:
        """Without those that change not even a zero."""
        return self[(self.decay != 1.0) | (self.alphas != 0.0).any(axis=1)]


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
    _store(x_ptr + i, x0, x1, x2, x3, in0, in1, in2, in3, DTYPE)


@triton.jit(do_not_specialize=["fold", "n", "base", "lead", "shift", "k0", "k1", "c3"])
def _fill(
    out_ptr, step_ptr, alpha_ptr, fold, n, base, lead, shift, k0, k1, c3,
    PROBES: tl.constexpr, RADEMACHER: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """out[f] ← Σₜ Σₖ alpha[t, k]·u_k of step t, over the steps t of fold f, n of them: a row of programs a fold."""
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
            a0, a1 = _accumulate(a0, u0, alpha), _accumulate(a1, u1, alpha)
            a2, a3 = _accumulate(a2, u2, alpha), _accumulate(a3, u3, alpha)
    i, in0, in1, in2, in3 = _place(start, lead, shift, n, LANES)
    _store(out_ptr + f.to(tl.int64) * n + i, a0, a1, a2, a3, in0, in1, in2, in3, tl.float32)


@triton.jit
def _outer(x, z_ptr, v_ptr, inside, decay, RANK: tl.constexpr):
    """decay·x + z Vᵀ, the products summed in order, each rounded."""
    delta = tl.load(z_ptr, mask=inside, other=0) * tl.load(v_ptr, mask=inside, other=0)
    for r in tl.static_range(1, RANK):
        delta = delta + tl.load(z_ptr + r, mask=inside, other=0) * tl.load(v_ptr + r, mask=inside, other=0)
    return _accumulate(x * decay, delta, 1.0)


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
    z0, z1, z2, z3 = row0 * RANK, row1 * RANK, row2 * RANK, row3 * RANK  # the compiler would divide at every step
    v0, v1 = (i - row0 * width) * RANK, (i + 1 - row1 * width) * RANK
    v2, v3 = (i + 2 - row2 * width) * RANK, (i + 3 - row3 * width) * RANK
    for t in range(count):
        v = v_ptr + tl.load(turn_ptr + t) * width * RANK
        decay = tl.load(decay_ptr + t).to(WIDE)
        if STOCHASTIC:
            w0, w1, w2, w3 = _philox(low, high, k0, k1, tl.load(step_ptr + t).to(tl.uint32), c3)
        x0 = _quantize(_outer(x0, z_ptr + z0, v + v0, in0, decay, RANK), w0, DTYPE, STOCHASTIC, False).to(WIDE)
        x1 = _quantize(_outer(x1, z_ptr + z1, v + v1, in1, decay, RANK), w1, DTYPE, STOCHASTIC, False).to(WIDE)
        x2 = _quantize(_outer(x2, z_ptr + z2, v + v2, in2, decay, RANK), w2, DTYPE, STOCHASTIC, False).to(WIDE)
        x3 = _quantize(_outer(x3, z_ptr + z3, v + v3, in3, decay, RANK), w3, DTYPE, STOCHASTIC, False).to(WIDE)
        z_ptr += height * RANK
    _store(x_ptr + i, x0, x1, x2, x3, in0, in1, in2, in3, DTYPE)


def _tiles(offset: int, numel: int) -> tuple[int, tuple[int, int, int]]:
    """How many tiles hold a tensor; counter of the first, and counters and weights of it that lie before the tensor."""
    counter, shift = divmod(offset, 4)
    lead = counter % LANES  # so that no tile crosses a multiple of 2**32 counters
    return -(-(lead * 4 + shift + numel) // (LANES * 4)), (counter - lead, lead, shift)


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A contiguous matrix that moves by z Vᵀ, and its place.

    Args:
        flat: its weights, m·n of them.
        offset: global offset of the first.
        width: n.
        rank: columns of z and V.
        fold: steps whose z are added up before they move the weights.
    """

    flat: Tensor
    offset: int
    width: int
    rank: int
    fold: int = 1

    @property
    def numel(self) -> int:
        """m·n."""
        return self.flat.numel()

    @property
    def coordinates(self) -> int:
        """Numbers drawn before a launch, for each of its folds."""
        return max(self.numel // self.width, self.width) * self.rank

    def advance_(self, steps: Steps, seed: int, distribution: Distribution, rounding: Rounding) -> None:
        """Take the steps, whole folds of them; z of every fold and V of every turn are drawn beforehand."""
        steps = steps.moving if self.fold == 1 else steps
        if not len(steps):
            return
        flat, rank = self.flat, self.rank
        key, rademacher = Key(seed, 0), distribution == Distribution.RADEMACHER
        last = steps[self.fold - 1 :: self.fold]
        turns, turn = np.unique(last.turn, return_inverse=True)

        def draw(key: Key, at: np.ndarray, alphas: np.ndarray, fold: int, rows: int) -> Tensor:
            out = torch.empty((len(at) // fold, rows * rank), dtype=torch.float32, device=flat.device)
            tiles, place = _tiles(self.offset, rows * rank)
            _fill[(tiles, len(out))](
                out, _there(at, flat), _there(alphas, flat), fold, rows * rank, *place, *key.words[:2], key.words[3],
                PROBES=alphas.shape[1], RADEMACHER=rademacher, LANES=LANES, num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
            return out

        height = self.numel // self.width
        z = draw(key, steps.step, steps.alphas, self.fold, height)
        v = draw(key.to(stream=BASIS), turns, np.ones((len(turns), 1)), 1, self.width)
        tiles, place = _tiles(self.offset, self.numel)
        _advance_outer[(tiles,)](
            flat, z, v, _there(last.step, flat), _there(turn, flat), _there(last.decay, flat), len(last), self.numel,
            *place, self.width, height, *key.words[:2], key.to(stream=ROUNDING).words[3],
            RANK=rank, STOCHASTIC=rounding == Rounding.STOCHASTIC and flat.dtype.itemsize == 2,
            LANES=LANES, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Tensors that one launch serves: they share device, dtype and kind of mask."""

    pieces: Sequence[Piece]
    fold = coordinates = 1

    @property
    def flat(self) -> Tensor:
        """The first of them."""
        return self.pieces[0].flat

    @property
    def numel(self) -> int:
        """Weights of all."""
        return sum(piece.flat.numel() for piece in self.pieces)

    def advance_(self, steps: Steps, seed: int, distribution: Distribution, rounding: Rounding) -> None:
        """Take the steps on every piece."""
        steps = steps.moving
        if not len(steps):
            return
        pieces, flat, mask = self.pieces, self.flat, self.pieces[0].mask
        key = Key(seed, 0)
        mask_key, limit = (mask.key, mask.limit) if isinstance(mask, Bernoulli) else (key, 0)
        table = np.empty((len(pieces), COLUMNS.value), np.int64)
        tiles = np.empty(len(pieces), np.int64)
        for i, piece in enumerate(pieces):
            tiles[i], place = _tiles(piece.offset, piece.flat.numel())
            table[i] = piece.flat.data_ptr(), piece.flat.numel(), *place
        tensor = np.repeat(np.arange(len(pieces)), tiles)
        tile = np.arange(len(tensor)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        thresholds = np.array([p.mask.threshold if isinstance(p.mask, Magnitude) else 0.0 for p in pieces])
        tables = (tensor, tile, table, thresholds, steps.step, steps.turn, steps.alphas, steps.decay)
        _advance[(len(tensor),)](
            *(_there(values, flat) for values in tables),
            len(steps), *key.words[:2], key.words[3], mask_key.words[3], limit,
            DTYPE=TYPES[flat.dtype], PROBES=steps.alphas.shape[1], MASK=MASKS[type(mask)],
            RADEMACHER=distribution == Distribution.RADEMACHER,
            STOCHASTIC=rounding == Rounding.STOCHASTIC and flat.dtype.itemsize == 2,
            LANES=LANES, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def _there(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)
