"""The GPU kernel (Triton), equal to ``reference.py`` to the bit.

A lane of the program owns eight consecutive elements, that is two counters, so
nothing crosses lanes and every load and store of 16-bit weights is 16 bytes.
Contraction is off (``enable_fp_fusion=False``): each ``tl.fma`` below is one the
specification names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..noise import BASIS, ROUNDING, Distribution, Key, Rounding
from .spec import (
    COS,
    LN_U,
    LOG,
    LOG_BREAK,
    MULTIPLIERS,
    ONE,
    SIN,
    WEYL,
    Bernoulli,
    Magnitude,
    Mask,
)

GROUPS, WARPS = 512, 4  # lanes of a program, eight elements each; 256 with 2 warps is as fast
SMALL, SMALL_GROUPS, SMALL_WARPS = 1 << 18, 64, 2  # elements up to which a program's own time is what a launch takes
FEW = 1024  # tiles up to which a second and third launch take longer than bounds
ADAM_GROUPS = 128  # lanes of an Adam program: three tensors and two draws fill the registers
NONE, MAGNITUDE, BERNOULLI = range(3)
MASKS = {type(None): NONE, Magnitude: MAGNITUDE, Bernoulli: BERNOULLI}

BASIS_STREAM = tl.constexpr(BASIS)
M0, M1 = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
W0, W1 = tl.constexpr(WEYL[0]), tl.constexpr(WEYL[1])
L0, L1, L2, L3, L4, L5, L6, L7, L8 = (tl.constexpr(c) for c in LOG)
S0, S1, S2, S3, S4 = (tl.constexpr(c) for c in SIN)
C0, C1, C2, C3, C4 = (tl.constexpr(c) for c in COS)
K, BREAK = tl.constexpr(LN_U), tl.constexpr(LOG_BREAK)
MINUS_ONE = tl.constexpr(-ONE)


@triton.jit
def _multiply(a, m: tl.constexpr):
    """High and low words of the 64-bit product of a uint32 tensor and a constant."""
    product = a.to(tl.uint64) * m
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def _philox(low, high, k0, k1, c2, c3):
    """Four words of each counter: a tensor of low words under one high word."""
    a = low
    b = high
    c = c2
    d = c3
    for _ in tl.static_range(10):  # the first two rounds are half scalar, which is why high is not a tensor
        p1, p0 = _multiply(a, M0)
        q1, q0 = _multiply(c, M1)
        a, b, c, d = q1 ^ b ^ k0, q0, p1 ^ d ^ k1, p0
        k0 = (k0 + W0).to(tl.uint32)
        k1 = (k1 + W1).to(tl.uint32)
    return a, b, c, d


@triton.jit
def _fma(a, b, c: tl.constexpr):
    return tl.fma(a, b, tl.full(a.shape, c, tl.float32))


@triton.jit
def _sqrt(x):
    """The correctly rounded root for x in [2**-24, 2**6], without sqrt_rn's branch for other ranges."""
    y = tl.rsqrt(x)
    s = x * y
    return tl.fma(tl.fma(-s, s, x), 0.5 * y, s)


@triton.jit
def _box_muller(a, b):
    u = tl.abs(a.to(tl.int32, bitcast=True).to(tl.float32)) + 0.5
    bits = u.to(tl.int32, bitcast=True)
    e = (bits - BREAK) & -8388608  # -(2**23): the exponent, in its place
    f = _fma((bits - e).to(tl.float32, bitcast=True), tl.full(a.shape, 2.0**-31, tl.float32), MINUS_ONE)
    p = tl.full(a.shape, L8, tl.float32)
    p = _fma(p, f, L7)
    p = _fma(p, f, L6)
    p = _fma(p, f, L5)
    p = _fma(p, f, L4)
    p = _fma(p, f, L3)
    p = _fma(p, f, L2)
    p = _fma(p, f, L1)
    p = _fma(p, f, L0)
    radius = _sqrt(tl.fma(e.to(tl.float32), tl.full(a.shape, K, tl.float32), f * p))
    radius = (radius.to(tl.uint32, bitcast=True) ^ (a & 0x80000000)).to(tl.float32, bitcast=True)
    t = b.to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-32
    v = t * t
    s = _fma(_fma(_fma(_fma(tl.full(a.shape, S4, tl.float32), v, S3), v, S2), v, S1), v, S0)
    c = _fma(_fma(_fma(_fma(tl.full(a.shape, C4, tl.float32), v, C3), v, C2), v, C1), v, C0)
    return radius * c, radius * (t * s)


@triton.jit
def _interleave(e0, e1, e2, e3, e4, e5, e6, e7, SIZE: tl.constexpr):
    """Eight tensors of one element a lane, as one tensor in element order."""
    even = tl.join(tl.join(e0, e4), tl.join(e2, e6))
    odd = tl.join(tl.join(e1, e5), tl.join(e3, e7))
    return tl.reshape(tl.join(even, odd), [SIZE])


@triton.jit
def _words(low, high, k0, k1, c2, c3, SIZE: tl.constexpr):
    """The word of every element."""
    a0, a1, a2, a3 = _philox(low, high, k0, k1, c2, c3)
    b0, b1, b2, b3 = _philox(low + 1, high, k0, k1, c2, c3)
    return _interleave(a0, a1, a2, a3, b0, b1, b2, b3, SIZE)


@triton.jit
def _noise(low, high, k0, k1, c2, c3, RADEMACHER: tl.constexpr, SIZE: tl.constexpr):
    """Noise and word of every element."""
    a0, a1, a2, a3 = _philox(low, high, k0, k1, c2, c3)
    b0, b1, b2, b3 = _philox(low + 1, high, k0, k1, c2, c3)
    word = _interleave(a0, a1, a2, a3, b0, b1, b2, b3, SIZE)
    if RADEMACHER:
        u = 1.0 - 2.0 * (word >> 31).to(tl.float32)
    else:
        z0, z1 = _box_muller(a0, a1)
        z2, z3 = _box_muller(a2, a3)
        z4, z5 = _box_muller(b0, b1)
        z6, z7 = _box_muller(b2, b3)
        u = _interleave(z0, z1, z2, z3, z4, z5, z6, z7, SIZE)
    return u, word


@triton.jit
def _quantize(x, word, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr, FLIP: tl.constexpr):
    """fp32 → DTYPE: to nearest even, or stochastic by each element's word."""
    if STOCHASTIC:
        t = x.to(tl.uint32, bitcast=True)
        BELOW: tl.constexpr = 0xFFFF if DTYPE == tl.bfloat16 else 0x1FFF
        add = (~word if FLIP else word) & BELOW
        y = ((t + add) & (0xFFFFFFFF - BELOW)).to(tl.float32, bitcast=True)
        return tl.where(x == x, y, x).to(DTYPE)
    elif DTYPE == tl.bfloat16:  # the interpreter's own conversion cuts
        t = x.to(tl.uint32, bitcast=True)
        y = ((t + 0x7FFF + ((t >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        return tl.where(x == x, y, x).to(DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def _tick(clock_ptr, c3):
    """The step that a captured kernel is replayed for, or the first step of its turn for draws of a basis."""
    return tl.load(clock_ptr + tl.where((c3.to(tl.uint32) & 15) == BASIS_STREAM, 1, 0)).to(tl.uint32)


@triton.jit
def _accumulate(acc, u, alpha):
    """acc + alpha·u: rounded once in fp32, twice (product, sum) in fp64."""
    if acc.dtype == tl.float64:
        return acc + u.to(tl.float64) * alpha
    else:
        return tl.fma(u, tl.zeros_like(u) + alpha, acc)


@triton.jit
def _place(n, base, lead, shift, first, ALIGNED: tl.constexpr, WHOLE: tl.constexpr, GROUPS: tl.constexpr):
    """The even counters of this tile, their common high word, its elements' indices, and which of these exist.

    Tiles are aligned to multiples of GROUPS in the global order, so that no tile
    crosses a multiple of 2**32 counters; ``lead`` groups and ``shift`` elements of the first one lie before the tensor.
    """
    start = (first + tl.program_id(0)).to(tl.int64) * GROUPS
    counter = (base + start) * 2
    low = counter.to(tl.uint32) + 2 * tl.arange(0, GROUPS).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    index = (start - lead) * 8 + tl.arange(0, 8 * GROUPS)
    if not ALIGNED:
        index -= shift
    if WHOLE:
        inside = tl.full([8 * GROUPS], True, tl.int1)
    else:
        inside = (index >= 0) & (index < n)
    return low, high, index, inside


@triton.jit
def _kept(x, inside, threshold, low, high, k0, k1, m2, m3, limit, MASK: tl.constexpr, SIZE: tl.constexpr):
    """Which elements the mask keeps."""
    if MASK == 1:
        return tl.abs(x) <= threshold
    elif MASK == 2:
        return _words(low, high, k0, k1, m2.to(tl.uint32), m3.to(tl.uint32), SIZE) <= limit.to(tl.uint32)
    else:
        return inside


@triton.jit
def _probe(low, high, k0, k1, c2, c3, kept, MASK: tl.constexpr, RADEMACHER: tl.constexpr, SIZE: tl.constexpr):
    """Noise, 0 where not kept, and word of every element."""
    u, word = _noise(low, high, k0, k1, c2, c3, RADEMACHER, SIZE)
    if MASK != 0:
        u = tl.where(kept, u, 0.0)
    return u, word


@triton.jit(do_not_specialize=["n", "base", "lead", "shift", "first", "k0", "k1", "c2", "c3", "m2", "m3", "limit"])
def _add_noise(
    out_ptr, minus_ptr, x_ptr, coeffs_ptr, clock_ptr, n, base, lead, shift, first, alpha, decay, threshold,
    k0, k1, c2, c3, m2, m3, limit,
    ALIGNED: tl.constexpr, WHOLE: tl.constexpr, PROBES: tl.constexpr, POINTER: tl.constexpr, CLOCK: tl.constexpr,
    PAIR: tl.constexpr, LOAD: tl.constexpr, DECAY: tl.constexpr, MASK: tl.constexpr, RADEMACHER: tl.constexpr,
    STOCHASTIC: tl.constexpr, FLIP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = GROUPS * 8
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    low, high, index, inside = _place(n, base, lead, shift, first, ALIGNED, WHOLE, GROUPS)
    if LOAD:
        x = tl.load(x_ptr + index, mask=inside, other=0).to(WIDE)
    else:
        x = tl.zeros([SIZE], WIDE)
    FIRST: tl.constexpr = 2 if POINTER == 1 else 0
    if POINTER == 1:  # fp64 coefficients, or several: decay, threshold, alpha of each probe
        decay = tl.load(coeffs_ptr).to(WIDE)
        threshold = tl.load(coeffs_ptr + 1).to(WIDE)
    if POINTER != 0:
        alpha = tl.load(coeffs_ptr + FIRST).to(WIDE)
    if CLOCK:
        c2 = _tick(clock_ptr, c3)
        m2 = _tick(clock_ptr, m3)
    k0, k1, c2, c3 = k0.to(tl.uint32), k1.to(tl.uint32), c2.to(tl.uint32), c3.to(tl.uint32)
    acc = x
    if DECAY:
        acc = x * decay
    kept = _kept(x, inside, threshold, low, high, k0, k1, m2, m3, limit, MASK, SIZE)
    u, word = _probe(low, high, k0, k1, c2, c3, kept, MASK, RADEMACHER, SIZE)
    acc = _accumulate(acc, u, alpha)
    for k in range(1, PROBES):
        v, _ = _probe(low, high, k0, k1, c2, (c3 + 16 * k).to(tl.uint32), kept, MASK, RADEMACHER, SIZE)
        acc = _accumulate(acc, v, tl.load(coeffs_ptr + FIRST + k).to(WIDE))
    if POINTER == 2 and not DECAY:  # a step that is not taken changes not even the sign of a zero
        moved = tl.abs(alpha)
        for k in range(1, PROBES):
            moved += tl.abs(tl.load(coeffs_ptr + k).to(WIDE))
        acc = tl.where(moved == 0, x, acc)
    tl.store(out_ptr + index, _quantize(acc, word, DTYPE, STOCHASTIC, FLIP), mask=inside)
    if PAIR:
        acc = _accumulate(x, u, -alpha)
        tl.store(minus_ptr + index, _quantize(acc, word, DTYPE, STOCHASTIC, not FLIP), mask=inside)


@triton.jit(do_not_specialize=["n", "base", "lead", "shift", "first", "k0", "k1", "c2", "c3"])
def _add(
    x_ptr, delta_ptr, v_ptr, coeffs_ptr, clock_ptr, n, base, lead, shift, first, alpha, decay, k0, k1, c2, c3, width,
    ALIGNED: tl.constexpr, WHOLE: tl.constexpr, RANK: tl.constexpr, CLOCK: tl.constexpr, DECAY: tl.constexpr,
    STOCHASTIC: tl.constexpr, FLIP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = GROUPS * 8
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    low, high, index, inside = _place(n, base, lead, shift, first, ALIGNED, WHOLE, GROUPS)
    acc = tl.load(x_ptr + index, mask=inside, other=0).to(WIDE)
    if tl.float64 == WIDE:
        decay = tl.load(coeffs_ptr)
        alpha = tl.load(coeffs_ptr + 1)
    if DECAY:
        acc = acc * decay
    if RANK == 0:
        delta = tl.load(delta_ptr + index, mask=inside, other=0)
    else:  # row i, column j of z Vᵀ, the products summed in order, each rounded
        row = tl.maximum(tl.min(index, 0), 0) // width  # one long division a tile, short ones a lane
        local = (index - row * width).to(tl.int32)
        i = row + local // width
        j = local % width
        delta = tl.load(delta_ptr + i * RANK, mask=inside, other=0) * tl.load(v_ptr + j, mask=inside, other=0)
        for k in tl.static_range(1, RANK):
            z = tl.load(delta_ptr + i * RANK + k, mask=inside, other=0)
            delta = delta + z * tl.load(v_ptr + k * width + j, mask=inside, other=0)
    acc = _accumulate(acc, delta, alpha)
    word = tl.zeros([SIZE], tl.uint32)
    if STOCHASTIC:
        if CLOCK:
            c2 = tl.load(clock_ptr)
        word = _words(low, high, k0.to(tl.uint32), k1.to(tl.uint32), c2.to(tl.uint32), c3.to(tl.uint32), SIZE)
    tl.store(x_ptr + index, _quantize(acc, word, DTYPE, STOCHASTIC, FLIP), mask=inside)


@triton.jit(
    do_not_specialize=["n", "base", "lead", "shift", "first", "k0", "k1", "c2", "c3", "r3", "m2", "m3", "limit"]
)
def _adam(
    x_ptr, m_ptr, v_ptr, scalars_ptr, clock_ptr, n, base, lead, shift, first, beta1, rest1, beta2, rest2, eps, decay,
    threshold, k0, k1, c2, c3, r3, m2, m3, limit,
    ALIGNED: tl.constexpr, WHOLE: tl.constexpr, PROBES: tl.constexpr, CLOCK: tl.constexpr, DECAY: tl.constexpr,
    MASK: tl.constexpr, RADEMACHER: tl.constexpr, STOCHASTIC: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    if tl.load(scalars_ptr) == 0:
        return
    SIZE: tl.constexpr = GROUPS * 8
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    MOMENT: tl.constexpr = m_ptr.dtype.element_ty
    low, high, index, inside = _place(n, base, lead, shift, first, ALIGNED, WHOLE, GROUPS)
    x = tl.load(x_ptr + index, mask=inside, other=0).to(tl.float32)
    m = tl.load(m_ptr + index, mask=inside, other=0).to(tl.float32)
    v = tl.load(v_ptr + index, mask=inside, other=0).to(tl.float32)
    if CLOCK:
        c2 = _tick(clock_ptr, c3)
        m2 = _tick(clock_ptr, m3)
    k0, k1, c2, c3 = k0.to(tl.uint32), k1.to(tl.uint32), c2.to(tl.uint32), c3.to(tl.uint32)
    kept = _kept(x, inside, threshold, low, high, k0, k1, m2, m3, limit, MASK, SIZE)
    u, word = _probe(low, high, k0, k1, c2, c3, kept, MASK, RADEMACHER, SIZE)
    g = u * tl.load(scalars_ptr + 4)
    for k in range(1, PROBES):
        u, _ = _probe(low, high, k0, k1, c2, (c3 + 16 * k).to(tl.uint32), kept, MASK, RADEMACHER, SIZE)
        g = _accumulate(g, u, tl.load(scalars_ptr + 4 + k))
    m = _accumulate(g * rest1, m, beta1)
    v = _accumulate((g * g) * rest2, v, beta2)
    root = tl.sqrt_rn(v * tl.load(scalars_ptr + 3)) + eps
    d = tl.div_rn(m * tl.load(scalars_ptr + 2), root)
    if DECAY:
        x = x * decay
    x = _accumulate(x, d, tl.load(scalars_ptr + 1))
    tl.store(x_ptr + index, _quantize(x, word, DTYPE, STOCHASTIC, False), mask=inside)
    NARROW: tl.constexpr = MOMENT == tl.bfloat16
    if NARROW:
        word = _words(low, high, k0, k1, c2, r3.to(tl.uint32), SIZE)
    tl.store(m_ptr + index, _quantize(m, word, MOMENT, NARROW, False), mask=inside)
    tl.store(v_ptr + index, _quantize(v, word >> 16, MOMENT, NARROW, False), mask=inside)


_clock: Tensor | None = None


@contextlib.contextmanager
def clocked(clock: Tensor) -> Iterator[None]:
    """Kernels launched inside read their step on the device, so that a captured launch can be replayed for another.

    Args:
        clock: (2,) int64: the step, and the first step of its turn, which addresses bases.
    """
    global _clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before


def _lanes(n: int) -> tuple[int, int]:
    """Groups and warps of a program."""
    return (SMALL_GROUPS, SMALL_WARPS) if n <= SMALL else (GROUPS, WARPS)


def _tiles(n: int, offset: int, groups: int) -> tuple[tuple[int, int, int], list[tuple[int, int, bool]]]:
    """Where the tiles of [offset, offset + n) lie, and launches (first tile, tiles, whole).

    Whole tiles need no bounds, which saves a tenth of the time; a tensor of few tiles is one launch with bounds.
    """
    group, shift = divmod(offset, 8)
    lead = group % groups
    before = lead * 8 + shift
    tiles, full = triton.cdiv(before + n, groups * 8), (before + n) // (groups * 8)
    start = 1 if before else 0
    if full - start < FEW:
        launches = [(0, tiles, False)]
    else:
        launches = [(0, start, False), (start, full - start, True), (full, tiles - full, False)]
    return (group - lead, lead, shift), [launch for launch in launches if launch[1]]


def _coeffs(like: Tensor, *values: float) -> Tensor:
    """Coefficients in fp64 on the device: a launch passes Python floats as fp32."""
    return torch.tensor(values, dtype=torch.float64).to(like.device, non_blocking=True)


def fill_(
    out: Tensor, key: Key, alphas: tuple[float, ...] | Tensor, *, offset: int, distribution: Distribution
) -> None:
    """out[i] ← Σₖ alphas[k]·u_{probe + k}[offset + i], rounded to nearest; out is flat."""
    _launch(out, None, None, key, alphas, offset, 1.0, None, distribution, False, False)


def add_noise_(
    out: Tensor,
    x: Tensor,
    key: Key,
    alphas: tuple[float, ...] | Tensor,
    *,
    offset: int,
    decay: float,
    mask: Mask | None,
    distribution: Distribution,
    rounding: Rounding,
    flip: bool = False,
    minus: Tensor | None = None,
) -> None:
    """out ← round(decay·x + Σₖ alphas[k]·u_{probe + k}), masked; flat tensors, out may be x.

    With ``flip`` the rounding bits are complemented.  With ``minus``:
    minus ← round(x - alphas[0]·u) too, from the same draw, with the bits complemented.
    """
    stochastic = rounding == Rounding.STOCHASTIC and x.dtype.itemsize == 2
    _launch(out, minus, x, key, alphas, offset, decay, mask, distribution, stochastic, flip)


def _mask(mask: Mask | None, key: Key) -> tuple[float, tuple[int, int], int]:
    """Threshold, upper counter words and limit of a mask beside noise of ``key``."""
    threshold = mask.threshold if isinstance(mask, Magnitude) else 0.0
    mask_key, limit = (mask.key, mask.limit) if isinstance(mask, Bernoulli) else (key, 0)
    if mask_key.seed != key.seed:
        raise ValueError(f"noise and mask of one step share a seed, got {key.seed} and {mask_key.seed}")
    return threshold, mask_key.words[2:], limit


def _launch(
    out: Tensor,
    minus: Tensor | None,
    x: Tensor | None,
    key: Key,
    alphas: tuple[float, ...] | Tensor,
    offset: int,
    decay: float,
    mask: Mask | None,
    distribution: Distribution,
    stochastic: bool,
    flip: bool,
) -> None:
    threshold, mask_words, limit = _mask(mask, key)
    n = out.numel()
    groups, warps = _lanes(n)
    (base, lead, shift), launches = _tiles(n, offset, groups)
    if isinstance(alphas, Tensor):
        pointer, coeffs, alpha = 2, alphas, 0.0
    else:
        pointer, alpha = int(len(alphas) > 1 or out.dtype == torch.float64), alphas[0]
        coeffs = _coeffs(out, decay, threshold, *alphas) if pointer else out
    clock = out if _clock is None else _clock
    with torch.cuda.device_of(out):
        for first, tiles, whole in launches:
            _add_noise[(tiles,)](
                out, out if minus is None else minus, out if x is None else x, coeffs, clock,
                n, base, lead, shift, first, alpha, decay, threshold, *key.words, *mask_words, limit,
                ALIGNED=shift == 0, WHOLE=whole, PROBES=len(alphas), POINTER=pointer, CLOCK=_clock is not None,
                PAIR=minus is not None, LOAD=x is not None, DECAY=decay != 1.0, MASK=MASKS[type(mask)],
                RADEMACHER=distribution == Distribution.RADEMACHER, STOCHASTIC=stochastic, FLIP=flip,
                GROUPS=groups, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip


def add_(
    x: Tensor,
    delta: Tensor,
    alpha: float,
    key: Key,
    *,
    offset: int,
    decay: float,
    rounding: Rounding,
    flip: bool = False,
) -> None:
    """x ← round(decay·x + alpha·delta) with rounding bits from ``key``; flat tensors, delta fp32."""
    _launch_add(x, delta, delta, 0, 1, alpha, key, offset, decay, rounding, flip)


def add_outer_(
    x: Tensor,
    z: Tensor,
    v: Tensor,
    alpha: float,
    key: Key,
    *,
    offset: int,
    decay: float,
    rounding: Rounding,
    flip: bool = False,
) -> None:
    """x ← round(decay·x + alpha·z Vᵀ); x flat, z (m, r) and v (n, r) fp32, z contiguous."""
    _launch_add(x, z, v.T.contiguous(), z.shape[1], v.shape[0], alpha, key, offset, decay, rounding, flip)


def _launch_add(
    x: Tensor,
    delta: Tensor,
    v: Tensor,
    rank: int,
    width: int,
    alpha: float,
    key: Key,
    offset: int,
    decay: float,
    rounding: Rounding,
    flip: bool,
) -> None:
    n = x.numel()
    groups, warps = _lanes(n)
    (base, lead, shift), launches = _tiles(n, offset, groups)
    coeffs = _coeffs(x, decay, alpha) if x.dtype == torch.float64 else x
    clock = x if _clock is None else _clock
    with torch.cuda.device_of(x):
        for first, tiles, whole in launches:
            _add[(tiles,)](
                x, delta, v, coeffs, clock, n, base, lead, shift, first, alpha, decay, *key.words, width,
                ALIGNED=shift == 0, WHOLE=whole, RANK=rank, CLOCK=_clock is not None, DECAY=decay != 1.0,
                STOCHASTIC=rounding == Rounding.STOCHASTIC and x.dtype.itemsize == 2,
                FLIP=flip, GROUPS=groups, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip


def adam_(
    x: Tensor,
    m: Tensor,
    v: Tensor,
    key: Key,
    scalars: tuple[float, ...] | Tensor,
    constants: tuple[float, ...],
    *,
    offset: int,
    decay: float,
    mask: Mask | None,
    distribution: Distribution,
    rounding: Rounding,
) -> None:
    """Adam's update of flat x, m and v: (taken, -lr, c1, c2, shares), (β1, 1 - β1, β2, 1 - β2, eps) in fp32."""
    threshold, mask_words, limit = _mask(mask, key)
    n = x.numel()
    (base, lead, shift), launches = _tiles(n, offset, ADAM_GROUPS)
    if not isinstance(scalars, Tensor):
        scalars = torch.tensor(scalars, dtype=torch.float32).to(x.device, non_blocking=True)
    clock = x if _clock is None else _clock
    with torch.cuda.device_of(x):
        for first, tiles, whole in launches:
            _adam[(tiles,)](
                x, m, v, scalars, clock, n, base, lead, shift, first, *constants, decay, threshold, *key.words,
                key.to(stream=ROUNDING).words[3], *mask_words, limit,
                ALIGNED=shift == 0, WHOLE=whole, PROBES=len(scalars) - 4, CLOCK=_clock is not None, DECAY=decay != 1.0,
                MASK=MASKS[type(mask)], RADEMACHER=distribution == Distribution.RADEMACHER,
                STOCHASTIC=rounding == Rounding.STOCHASTIC and x.dtype.itemsize == 2,
                GROUPS=ADAM_GROUPS, num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
