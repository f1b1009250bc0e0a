"""The GPU kernels (Triton), equal to ``reference.py`` to the bit.

A lane owns eight consecutive elements, as in the kernels of the noise: with 4 bits they are one 32-bit word.

A kernel takes a second or two to compile, so there are few: all tiles have bounds, and the kernel reads the sign
of eps.  If 16 divides ``n``, which Triton then knows, loads stay wide and bounds cost 3 % more instructions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...noise import ROUNDING, Distribution, Draw, Rounding
from ..shared.branch import home
from ..shared.dispatch import Alpha
from ..shared.triton import (
    MASKS,
    NUMBERS,
    accumulate,
    element_words,
    interleave,
    kept_elements,
    lanes,
    mask_numbers,
    masked_noise,
    quantize,
    tick,
    tile,
    tiles_of,
)
from .layout import Integers
from .reference import MIDDLE

CENTRE = tl.constexpr(MIDDLE)
PLAIN = [name for name in NUMBERS if name != "n"]
"""Arguments that Triton does not specialize on."""


@triton.jit
def _nibble(word, k: tl.constexpr):
    return ((word >> (4 * k)) & 15).to(tl.int32) - 8


@triton.jit
def _repeated(x, SIZE: tl.constexpr):
    """The number of every lane, for each of its elements."""
    return interleave(x, x, x, x, x, x, x, x, SIZE)


@triton.jit
def _integers(codes_ptr, lane, index, n, inside, BITS: tl.constexpr, LANES: tl.constexpr, SIZE: tl.constexpr):
    """The integer of every element, in int32."""
    if BITS == 8:
        return tl.load(codes_ptr + index, mask=inside, other=0).to(tl.int8, bitcast=True).to(tl.int32)
    elif LANES:
        word = tl.load(codes_ptr + lane, mask=(lane >= 0) & (lane * 8 < n), other=0).to(tl.uint32, bitcast=True)
        return interleave(
            _nibble(word, 0), _nibble(word, 1), _nibble(word, 2), _nibble(word, 3),
            _nibble(word, 4), _nibble(word, 5), _nibble(word, 6), _nibble(word, 7), SIZE,
        )  # fmt: skip
    else:
        both = tl.load(codes_ptr + index // 2, mask=inside, other=0).to(tl.int32)
        return ((both >> (4 * (index % 2)).to(tl.int32)) & 15) - 8


@triton.jit
def _of_groups(ptr, lane, index, n, inside, GROUP: tl.constexpr, LANES: tl.constexpr, SIZE: tl.constexpr):
    """The number of every element's group."""
    if LANES and GROUP % 8 == 0:
        EIGHTHS: tl.constexpr = GROUP // 8
        mine = tl.load(ptr + lane // EIGHTHS, mask=(lane >= 0) & (lane * 8 < n), other=0)
        return _repeated(mine, SIZE)
    else:
        return tl.load(ptr + index // GROUP, mask=inside, other=0)


@triton.jit
def _shifted(q, zeros_ptr, lane, index, n, inside, ZEROS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
             SIZE: tl.constexpr):  # fmt: skip
    """q - z."""
    if ZEROS:
        return q - _of_groups(zeros_ptr, lane, index, n, inside, GROUP, LANES, SIZE).to(tl.int32)
    else:
        return q


@triton.jit
def _numbers(codes_ptr, scales_ptr, zeros_ptr, lane, index, n, inside, BITS: tl.constexpr, GROUP: tl.constexpr,
             LANES: tl.constexpr, ZEROS: tl.constexpr, DTYPE: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """s·(q - z) of every element, rounded to DTYPE."""
    q = _integers(codes_ptr, lane, index, n, inside, BITS, LANES, SIZE)
    q = _shifted(q, zeros_ptr, lane, index, n, inside, ZEROS, GROUP, LANES, SIZE)
    s = _of_groups(scales_ptr, lane, index, n, inside, GROUP, LANES, SIZE).to(tl.float32)
    return quantize(q.to(tl.float32) * s, q, DTYPE, False, False)


@triton.jit
def _expand(
    out_ptr, codes_ptr, scales_ptr, zeros_ptr, n,
    BITS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, ZEROS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    # two dimensions, lanes and elements: the numbers of a lane reach its elements without shared memory
    lane = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    column = tl.arange(0, 8)[None, :]
    index = lane[:, None] * 8 + column
    inside = index < n
    if BITS == 8:
        q = tl.load(codes_ptr + index, mask=inside, other=0).to(tl.int32)
    elif LANES:
        word = tl.load(codes_ptr + lane, mask=lane * 8 < n, other=0).to(tl.uint32, bitcast=True)
        q = ((word[:, None] >> (4 * column).to(tl.uint32)) & 15).to(tl.int32) - 8
    else:
        q = ((tl.load(codes_ptr + index // 2, mask=inside, other=0).to(tl.int32) >> 4 * (column % 2)) & 15) - 8
    if LANES and GROUP % 8 == 0:
        EIGHTHS: tl.constexpr = GROUP // 8
        s = tl.load(scales_ptr + lane // EIGHTHS, mask=lane * 8 < n, other=0).to(tl.float32)[:, None]
        if ZEROS:
            q -= tl.load(zeros_ptr + lane // EIGHTHS, mask=lane * 8 < n, other=0).to(tl.int32)[:, None]
    else:
        s = tl.load(scales_ptr + index // GROUP, mask=inside, other=0).to(tl.float32)
        if ZEROS:
            q -= tl.load(zeros_ptr + index // GROUP, mask=inside, other=0).to(tl.int32)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + index, quantize(q.to(tl.float32) * s, q, DTYPE, False, False), mask=inside)


@triton.jit(do_not_specialize=[*PLAIN, "m2", "m3", "limit"])
def _perturb(
    out_ptr, minus_ptr, codes_ptr, scales_ptr, zeros_ptr, clock_ptr, n, base, lead, shift, alpha,
    k0, k1, c2, c3, m2, m3, limit,
    BITS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, ZEROS: tl.constexpr, ALIGNED: tl.constexpr,
    CLOCK: tl.constexpr, PAIR: tl.constexpr, MASK: tl.constexpr, RADEMACHER: tl.constexpr,
    STOCHASTIC: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = GROUPS * 8
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    low, high, index, inside = tile(n, base, lead, shift, 0, 0, 0, ALIGNED, False, False, GROUPS)
    lane = tl.program_id(0).to(tl.int64) * GROUPS - lead + tl.arange(0, GROUPS)
    x = _numbers(codes_ptr, scales_ptr, zeros_ptr, lane, index, n, inside, BITS, GROUP, LANES, ZEROS, DTYPE, SIZE)
    x = x.to(tl.float32)
    if CLOCK:
        c2 = tick(clock_ptr, c3)
        m2 = tick(clock_ptr, m3)
    k0, k1, c2, c3 = k0.to(tl.uint32), k1.to(tl.uint32), c2.to(tl.uint32), c3.to(tl.uint32)
    kept = kept_elements(x, inside, 0.0, low, high, k0, k1, m2, m3, limit, MASK, SIZE)
    u, word = masked_noise(low, high, k0, k1, c2, c3, kept, MASK, RADEMACHER, SIZE)
    word ^= tl.where(alpha < 0, 0xFFFFFFFF, 0).to(tl.uint32)  # rounding mirrors with the sign
    plus = accumulate(x, u, alpha)
    tl.store(out_ptr + index, quantize(plus, word, DTYPE, STOCHASTIC, False), mask=inside)
    if PAIR:
        minus = accumulate(x, u, -alpha)
        tl.store(minus_ptr + index, quantize(minus, word, DTYPE, STOCHASTIC, True), mask=inside)


@triton.jit(do_not_specialize=[*PLAIN, "m2", "m3", "limit", "lowest", "largest"])
def _move(
    codes_ptr, scales_ptr, zeros_ptr, coeffs_ptr, clock_ptr, n, base, lead, shift, fading, lowest, largest,
    k0, k1, c2, c3, m2, m3, limit,
    BITS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, ZEROS: tl.constexpr, ALIGNED: tl.constexpr,
    CLOCK: tl.constexpr, PROBES: tl.constexpr, MASK: tl.constexpr, RADEMACHER: tl.constexpr,
    FADES: tl.constexpr, STOCHASTIC: tl.constexpr, STREAM: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = GROUPS * 8
    low, high, index, inside = tile(n, base, lead, shift, 0, 0, 0, ALIGNED, False, False, GROUPS)
    lane = tl.program_id(0).to(tl.int64) * GROUPS - lead + tl.arange(0, GROUPS)
    q = _integers(codes_ptr, lane, index, n, inside, BITS, LANES, SIZE)
    s = _of_groups(scales_ptr, lane, index, n, inside, GROUP, LANES, SIZE).to(tl.float32)
    if CLOCK:
        c2 = tick(clock_ptr, c3)
        m2 = tick(clock_ptr, m3)
    k0, k1, c2, c3 = k0.to(tl.uint32), k1.to(tl.uint32), c2.to(tl.uint32), c3.to(tl.uint32)
    kept = kept_elements(s, inside, 0.0, low, high, k0, k1, m2, m3, limit, MASK, SIZE)
    g = tl.zeros([SIZE], tl.float32)
    for k in range(PROBES):
        u, _ = masked_noise(low, high, k0, k1, c2, (c3 + 16 * k).to(tl.uint32), kept, MASK, RADEMACHER, SIZE)
        g = accumulate(g, u, tl.load(coeffs_ptr + k))
    change = tl.div_rn(g, tl.where(inside, s, 1.0))
    if FADES:
        shifted = _shifted(q, zeros_ptr, lane, index, n, inside, ZEROS, GROUP, LANES, SIZE)
        change = change + fading * shifted.to(tl.float32)
    # the ROUNDING stream's key differs only in its last four bits, and is for the same step
    word = element_words(low, high, k0, k1, c2, ((c3 & 0xFFFFFFF0) | STREAM).to(tl.uint32), SIZE)
    moved = quantize((q.to(tl.float32) + CENTRE) + change, word, tl.float16, STOCHASTIC, False).to(tl.float32) - CENTRE
    moved = tl.minimum(tl.maximum(moved, lowest.to(tl.float32)), largest.to(tl.float32)).to(tl.int32)
    if BITS == 8:
        tl.store(codes_ptr + index, moved.to(tl.int8), mask=inside)
    else:
        places = tl.reshape((moved + 8).to(tl.uint32), [GROUPS, 8]) << (4 * tl.arange(0, 8)).to(tl.uint32)[None, :]
        word = tl.sum(places, axis=1).to(tl.int32, bitcast=True)
        tl.store(codes_ptr + lane, word, mask=(lane >= 0) & (lane * 8 < n))


def expand(stored: Integers) -> Tensor:
    """(m, n) s·(q - z), in the dtype of the scales."""
    out = _empty(stored)
    n = out.numel()
    groups, warps = lanes(n)
    if n:
        with torch.cuda.device_of(out):
            _expand[(triton.cdiv(n, groups * 8),)](
                out, *_tensors(stored, 0), n, **_form(stored, 0), GROUPS=groups, num_warps=warps, enable_fp_fusion=False
            )
    return out


def perturb(stored: Integers, draw: Draw, eps: float, rounding: Rounding) -> Tensor:
    """(m, n) w + eps·u."""
    out = _empty(stored)
    _launch(out, None, stored, draw, eps, rounding)
    return out


def perturb_pair(stored: Integers, draw: Draw, eps: float, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """(m, n) w + eps·u and w - eps·u."""
    plus, minus = _empty(stored), _empty(stored)
    _launch(plus, minus, stored, draw, eps, rounding)
    return plus, minus


def _launch(out: Tensor, minus: Tensor | None, stored: Integers, draw: Draw, eps: float, rounding: Rounding) -> None:
    key, n = draw.key, out.numel()
    _, mask_words, limit = mask_numbers(draw)
    groups, warps = lanes(n)
    place, tiles = _tiles(n, draw.offset, groups)
    if n:
        with torch.cuda.device_of(out):
            _perturb[(tiles,)](
                out, out if minus is None else minus, *_tensors(stored, draw.offset),
                out if key.clock is None else key.clock, n, *place, eps, *key.words, *mask_words, limit,
                **_form(stored, draw.offset), ALIGNED=place[2] == 0, CLOCK=key.clock is not None,
                PAIR=minus is not None, MASK=MASKS[type(draw.mask)],
                RADEMACHER=draw.distribution == Distribution.RADEMACHER,
                STOCHASTIC=rounding == Rounding.STOCHASTIC and out.dtype.itemsize == 2,
                GROUPS=groups, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip


def add_noise_(stored: Integers, draw: Draw, alpha: Alpha, decay: float, rounding: Rounding) -> None:
    """q ← round(q + Σₖ alpha[k]·u_k / s + (decay - 1)·(q - z)); with 4 bits, each lane has a word."""
    key, n, device = draw.key, stored.codes.numel() * stored.per_byte, stored.codes.device
    if not isinstance(alpha, Tensor):
        numbers = [alpha] if isinstance(alpha, (int, float)) else list(alpha)
        alpha = torch.tensor(numbers, dtype=torch.float32).to(device, non_blocking=True)
    _, mask_words, limit = mask_numbers(draw)
    groups, warps = lanes(n)
    place, tiles = _tiles(n, draw.offset, groups)
    if n:
        with torch.cuda.device_of(stored.codes):
            _move[(tiles,)](
                *_tensors(stored, draw.offset), alpha, alpha if key.clock is None else key.clock, n, *place,
                decay - 1, *stored.limits, *key.words, *mask_words, limit,
                **_form(stored, draw.offset), ALIGNED=place[2] == 0, CLOCK=key.clock is not None,
                PROBES=alpha.numel(), MASK=MASKS[type(draw.mask)],
                RADEMACHER=draw.distribution == Distribution.RADEMACHER, FADES=decay != 1.0,
                STOCHASTIC=rounding == Rounding.STOCHASTIC, STREAM=ROUNDING,
                GROUPS=groups, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip


def _tiles(n: int, offset: int, groups: int) -> tuple[tuple[int, int, int], int]:
    """The place of a matrix's tiles, and their number."""
    place, launches = tiles_of(n, offset, groups)
    return place, sum(tiles for _, tiles, _ in launches)


def _empty(stored: Integers) -> Tensor:
    with home():
        return torch.empty(stored.shape, dtype=stored.scales.dtype, device=stored.codes.device)


def _tensors(stored: Integers, offset: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zero points, flat, in the dtypes that the kernels read."""
    words = stored.bits == 4 and stored.by_lane(offset)
    kind = torch.int32 if words else torch.uint8 if stored.bits == 4 else torch.int8
    codes, scales = stored.codes.detach().view(torch.uint8).view(-1).view(kind), stored.scales.detach().contiguous()
    return codes, scales, scales if stored.zeros is None else stored.zeros.contiguous()


def _form(stored: Integers, offset: int) -> dict[str, int | bool]:
    """The layout of the integers; each layout has its own compiled kernels."""
    return {
        "BITS": stored.bits,
        "GROUP": stored.group,
        "LANES": stored.by_lane(offset),
        "ZEROS": stored.zeros is not None,
    }
