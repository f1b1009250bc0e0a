"""The parts of the GPU kernels (Triton), equal to those of ``reference.py`` to the bit.

A lane of the program owns eight consecutive elements, that is two counters, so
nothing crosses lanes and every load and store of 16-bit weights is 16 bytes.
Contraction is off (``enable_fp_fusion=False``): the specification names each
``tl.fma`` below.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...noise import BASIS, Draw, RandomMask, SmallMask
from .spec import COS, LN_U, LOG, LOG_BREAK, MULTIPLIERS, ONE, SIN, WEYL

GROUPS, WARPS = 512, 4  # lanes of a program, eight elements each; 256 with 2 warps is as fast
SMALL, SMALL_GROUPS, SMALL_WARPS = 1 << 18, 64, 2  # up to SMALL elements, a launch takes as long as one program
MIN_WHOLE_TILES = 1024  # with fewer, a second and third launch take longer than bounds
MASKS = {type(None): 0, SmallMask: 1, RandomMask: 2}

NUMBERS = ["n", "base", "lead", "shift", "width", "stride", "first", "k0", "k1", "c2", "c3"]
"""Arguments of the kernels that Triton does not specialize on."""

BASIS_STREAM = tl.constexpr(BASIS)
M0, M1 = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
W0, W1 = tl.constexpr(WEYL[0]), tl.constexpr(WEYL[1])
L0, L1, L2, L3, L4, L5, L6, L7, L8 = (tl.constexpr(c) for c in LOG)
S0, S1, S2, S3, S4 = (tl.constexpr(c) for c in SIN)
C0, C1, C2, C3, C4 = (tl.constexpr(c) for c in COS)
K, BREAK = tl.constexpr(LN_U), tl.constexpr(LOG_BREAK)
MINUS_ONE = tl.constexpr(-ONE)


@triton.jit
def multiply(a, m: tl.constexpr):
    """High and low words of the 64-bit product of a uint32 tensor and a constant."""
    product = a.to(tl.uint64) * m
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def philox(low, high, k0, k1, c2, c3):
    """Four words of each counter: a tensor of low words under one high word."""
    a = low
    b = high
    c = c2
    d = c3
    for _ in tl.static_range(10):  # the first two rounds are half scalar, which is why high is not a tensor
        p1, p0 = multiply(a, M0)
        q1, q0 = multiply(c, M1)
        a, b, c, d = q1 ^ b ^ k0, q0, p1 ^ d ^ k1, p0
        k0 = (k0 + W0).to(tl.uint32)
        k1 = (k1 + W1).to(tl.uint32)
    return a, b, c, d


@triton.jit
def fma(a, b, c: tl.constexpr):
    return tl.fma(a, b, tl.full(a.shape, c, tl.float32))


@triton.jit
def sqrt(x):
    """The correctly rounded root for x in [2**-24, 2**6], without sqrt_rn's branch for other ranges."""
    y = tl.rsqrt(x)
    s = x * y
    return tl.fma(tl.fma(-s, s, x), 0.5 * y, s)


@triton.jit
def box_muller(a, b):
    u = tl.abs(a.to(tl.int32, bitcast=True).to(tl.float32)) + 0.5
    bits = u.to(tl.int32, bitcast=True)
    e = (bits - BREAK) & -8388608  # -(2**23): the exponent, left in place
    f = fma((bits - e).to(tl.float32, bitcast=True), tl.full(a.shape, 2.0**-31, tl.float32), MINUS_ONE)
    p = tl.full(a.shape, L8, tl.float32)
    p = fma(p, f, L7)
    p = fma(p, f, L6)
    p = fma(p, f, L5)
    p = fma(p, f, L4)
    p = fma(p, f, L3)
    p = fma(p, f, L2)
    p = fma(p, f, L1)
    p = fma(p, f, L0)
    radius = sqrt(tl.fma(e.to(tl.float32), tl.full(a.shape, K, tl.float32), f * p))
    radius = (radius.to(tl.uint32, bitcast=True) ^ (a & 0x80000000)).to(tl.float32, bitcast=True)
    t = b.to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-32
    v = t * t
    s = fma(fma(fma(fma(tl.full(a.shape, S4, tl.float32), v, S3), v, S2), v, S1), v, S0)
    c = fma(fma(fma(fma(tl.full(a.shape, C4, tl.float32), v, C3), v, C2), v, C1), v, C0)
    return radius * c, radius * (t * s)


@triton.jit
def interleave(e0, e1, e2, e3, e4, e5, e6, e7, SIZE: tl.constexpr):
    """Eight tensors of one element per lane, as one tensor in element order."""
    even = tl.join(tl.join(e0, e4), tl.join(e2, e6))
    odd = tl.join(tl.join(e1, e5), tl.join(e3, e7))
    return tl.reshape(tl.join(even, odd), [SIZE])


@triton.jit
def element_words(low, high, k0, k1, c2, c3, SIZE: tl.constexpr):
    """The word of every element."""
    a0, a1, a2, a3 = philox(low, high, k0, k1, c2, c3)
    b0, b1, b2, b3 = philox(low + 1, high, k0, k1, c2, c3)
    return interleave(a0, a1, a2, a3, b0, b1, b2, b3, SIZE)


@triton.jit
def element_noise(low, high, k0, k1, c2, c3, RADEMACHER: tl.constexpr, SIZE: tl.constexpr):
    """Noise and word of every element."""
    a0, a1, a2, a3 = philox(low, high, k0, k1, c2, c3)
    b0, b1, b2, b3 = philox(low + 1, high, k0, k1, c2, c3)
    word = interleave(a0, a1, a2, a3, b0, b1, b2, b3, SIZE)
    if RADEMACHER:
        u = 1.0 - 2.0 * (word >> 31).to(tl.float32)
    else:
        z0, z1 = box_muller(a0, a1)
        z2, z3 = box_muller(a2, a3)
        z4, z5 = box_muller(b0, b1)
        z6, z7 = box_muller(b2, b3)
        u = interleave(z0, z1, z2, z3, z4, z5, z6, z7, SIZE)
    return u, word


@triton.jit
def quantize(x, word, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr, FLIP: tl.constexpr):
    """fp32 → DTYPE: to nearest even, or stochastically by each element's word."""
    if STOCHASTIC:
        t = x.to(tl.uint32, bitcast=True)
        BELOW: tl.constexpr = 0xFFFF if DTYPE == tl.bfloat16 else 0x1FFF
        add = (~word if FLIP else word) & BELOW
        y = ((t + add) & (0xFFFFFFFF - BELOW)).to(tl.float32, bitcast=True)
        return tl.where(x == x, y, x).to(DTYPE)
    elif DTYPE == tl.bfloat16:  # the interpreter's own conversion truncates
        t = x.to(tl.uint32, bitcast=True)
        y = ((t + 0x7FFF + ((t >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        return tl.where(x == x, y, x).to(DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def tick(clock_ptr, c3):
    """The step that a captured kernel is replayed for, or the first step of its turn for draws of a basis."""
    return tl.load(clock_ptr + tl.where((c3.to(tl.uint32) & 15) == BASIS_STREAM, 1, 0)).to(tl.uint32)


@triton.jit
def accumulate(acc, u, alpha):
    """acc + alpha·u: rounded once in fp32, twice (product, sum) in fp64."""
    if acc.dtype == tl.float64:
        return acc + u.to(tl.float64) * alpha
    else:
        return tl.fma(u, tl.zeros_like(u) + alpha, acc)


@triton.jit
def tile(n, base, lead, shift, width, stride, first, ALIGNED: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
         GROUPS: tl.constexpr):  # fmt: skip
    """The even counters of this tile, their common high word, its elements' indices, and which elements exist.

    Tiles are aligned to multiples of GROUPS in the global order, so that no tile
    crosses a multiple of 2**32 counters; ``lead`` groups and ``shift`` elements of the first one lie before the tensor.
    With ROWS every row of ``width`` elements has its own tiles: ``base`` is the address of row 0, ``lead`` the
    number of elements of the rows that lie before the tensor.
    """
    if ROWS:
        row = (first + tl.program_id(0)).to(tl.int64)
        address = base + row * stride
        group = address // 8
        before = group % GROUPS
        start = tl.program_id(1).to(tl.int64) * GROUPS
        counter = (group - before + start) * 2
        column = (start - before) * 8 - address % 8 + tl.arange(0, 8 * GROUPS)
        index = row * width - lead + column
        inside = (column >= 0) & (column < width) & (index >= 0) & (index < n)
    else:
        start = (first + tl.program_id(0)).to(tl.int64) * GROUPS
        counter, index = stretch(start, base, lead, shift, ALIGNED, GROUPS)
        if WHOLE:
            inside = tl.full([8 * GROUPS], True, tl.int1)
        else:
            inside = (index >= 0) & (index < n)
    low, high = counters(counter, GROUPS)
    return low, high, index, inside


@triton.jit
def stretch(start, base, lead, shift, ALIGNED: tl.constexpr, GROUPS: tl.constexpr):
    """The first counter of a tile that begins with group ``start``, and its elements' indices, without rows."""
    index = (start - lead) * 8 + tl.arange(0, 8 * GROUPS)
    if not ALIGNED:
        index -= shift
    return (base + start) * 2, index


@triton.jit
def counters(first, GROUPS: tl.constexpr):
    """The even counters of a tile, and their common high word."""
    low = first.to(tl.uint32) + 2 * tl.arange(0, GROUPS).to(tl.uint32)
    return low, (first >> 32).to(tl.uint32)


@triton.jit
def kept_elements(x, inside, threshold, low, high, k0, k1, m2, m3, limit, MASK: tl.constexpr, SIZE: tl.constexpr):
    """True for the elements that the mask keeps."""
    if MASK == 1:
        return tl.abs(x) <= threshold
    elif MASK == 2:
        return element_words(low, high, k0, k1, m2.to(tl.uint32), m3.to(tl.uint32), SIZE) <= limit.to(tl.uint32)
    else:
        return inside


@triton.jit
def masked_noise(low, high, k0, k1, c2, c3, kept, MASK: tl.constexpr, RADEMACHER: tl.constexpr, SIZE: tl.constexpr):
    """Noise, 0 where not kept, and word of every element."""
    u, word = element_noise(low, high, k0, k1, c2, c3, RADEMACHER, SIZE)
    if MASK != 0:
        u = tl.where(kept, u, 0.0)
    return u, word


def lanes(n: int) -> tuple[int, int]:
    """Groups and warps of a program."""
    return (SMALL_GROUPS, SMALL_WARPS) if n <= SMALL else (GROUPS, WARPS)


def tiles_of(n: int, offset: int, groups: int) -> tuple[tuple[int, int, int], list[tuple[int, int, bool]]]:
    """The place of the tiles of [offset, offset + n), and the launches (first tile, tiles, whole).

    Whole tiles need no bounds, which saves a tenth of the time; a tensor of few tiles gets one launch with bounds.
    """
    group, shift = divmod(offset, 8)
    lead = group % groups
    before = lead * 8 + shift
    tiles, full = triton.cdiv(before + n, groups * 8), (before + n) // (groups * 8)
    start = 1 if before else 0
    if full - start < MIN_WHOLE_TILES:
        launches = [(0, tiles, False)]
    else:
        launches = [(0, start, False), (start, full - start, True), (full, tiles - full, False)]
    return (group - lead, lead, shift), [launch for launch in launches if launch[1]]


class Launch(NamedTuple):
    """A grid of tiles: the first tile or row, the grid, and whether every tile is whole."""

    first: int
    grid: tuple[int, ...]
    whole: bool


class Place(NamedTuple):
    """The addresses of a draw's elements, in the form that :func:`tile` takes."""

    base: int
    lead: int
    shift: int
    width: int
    stride: int

    @classmethod
    def of(cls, draw: Draw, n: int, groups: int) -> tuple[Place, list[Launch]]:
        """The place of the first n elements of a draw, and the launches that serve them."""
        if draw.rows is None:
            numbers, launches = tiles_of(n, draw.offset, groups)
            return cls(*numbers, 0, 0), [Launch(first, (tiles,), whole) for first, tiles, whole in launches]
        width, stride, before = draw.rows.width, draw.rows.stride, draw.rows.first
        rows = range(before // width, triton.cdiv(before + n, width))
        tiles = triton.cdiv(8 * groups - 1 + width, 8 * groups)  # wherever a row begins
        return cls(draw.offset, before, 0, width, stride), [Launch(rows.start, (len(rows), tiles), False)]


def fp64_on_device(like: Tensor, *values: float) -> Tensor:
    """Coefficients in fp64 on the device: a launch passes Python floats as fp32."""
    return torch.tensor(values, dtype=torch.float64).to(like.device, non_blocking=True)


def mask_numbers(draw: Draw) -> tuple[float, tuple[int, int], int]:
    """Threshold, upper counter words and limit of a draw's mask."""
    mask, key = draw.mask, draw.key
    threshold = mask.threshold if isinstance(mask, SmallMask) else 0.0
    mask_key, limit = (mask.key, mask.limit) if isinstance(mask, RandomMask) else (key, 0)
    if mask_key.seed != key.seed:
        raise ValueError(f"noise and mask of one step share a seed, got {key.seed} and {mask_key.seed}")
    if mask_key.clock is not key.clock:
        raise ValueError("noise and mask of one step share a clock, or have none")
    return threshold, mask_key.words[2:], limit
