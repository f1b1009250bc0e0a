"""The GPU kernel (Triton), equal to ``reference.py`` to the bit.

A lane of the program owns eight consecutive elements, that is two counters, so
nothing crosses lanes and every load and store of 16-bit weights is 16 bytes.  Contraction is off (``enable_fp_fusion=False``): each
``tl.fma`` below is one the specification names.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..noise import Distribution, Key, Rounding
from .spec import (
    COS,
    FP16_DITHER,
    FP16_TINY,
    LN_U,
    LOG,
    LOG_BREAK,
    MULTIPLIERS,
    SIN,
    U_SCALE,
    U_SHIFT,
    WEYL,
    Bernoulli,
    Magnitude,
    Mask,
)

GROUPS = 256  # lanes of a program: 2,048 elements
WARPS = 4
NONE, MAGNITUDE, BERNOULLI = range(3)
MASKS = {type(None): NONE, Magnitude: MAGNITUDE, Bernoulli: BERNOULLI}

M0, M1 = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
W0, W1 = tl.constexpr(WEYL[0]), tl.constexpr(WEYL[1])
L0, L1, L2, L3, L4, L5, L6, L7, L8 = (tl.constexpr(c) for c in LOG)
S0, S1, S2, S3, S4 = (tl.constexpr(c) for c in SIN)
C0, C1, C2, C3, C4 = (tl.constexpr(c) for c in COS)
K, BREAK = tl.constexpr(LN_U), tl.constexpr(LOG_BREAK)
SCALE, SHIFT_U = tl.constexpr(U_SCALE), tl.constexpr(U_SHIFT)
MIDDLE, TINY = tl.constexpr(1.0 + 4095 * FP16_DITHER), tl.constexpr(FP16_TINY)


@triton.jit
def _multiply(a, m: tl.constexpr):
    """High and low words of the 64-bit product of a uint32 tensor and a constant."""
    product = a.to(tl.uint64) * m
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def _philox(index, k0, k1, c2, c3):
    """Four words of each 64-bit counter in ``index``."""
    a = index.to(tl.uint32)
    b = (index >> 32).to(tl.uint32)
    c = tl.zeros_like(a) + c2
    d = tl.zeros_like(a) + c3
    for _ in tl.static_range(10):
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
    u = _fma(a.to(tl.float32), tl.full(a.shape, SCALE, tl.float32), SHIFT_U)
    bits = u.to(tl.int32, bitcast=True)
    e = (bits - BREAK) & -8388608  # -(2**23): the exponent, in its place
    f = (bits - e).to(tl.float32, bitcast=True) - 1.0
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
    radius = (radius.to(tl.uint32, bitcast=True) ^ (b & 0x80000000)).to(tl.float32, bitcast=True)
    t = (b << 1).to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-32
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
def _words(group, k0, k1, c2, c3, SIZE: tl.constexpr):
    """The word of every element."""
    a0, a1, a2, a3 = _philox(2 * group, k0, k1, c2, c3)
    b0, b1, b2, b3 = _philox(2 * group + 1, k0, k1, c2, c3)
    return _interleave(a0, a1, a2, a3, b0, b1, b2, b3, SIZE)


@triton.jit
def _noise(group, k0, k1, c2, c3, RADEMACHER: tl.constexpr, SIZE: tl.constexpr):
    """Noise and word of every element."""
    a0, a1, a2, a3 = _philox(2 * group, k0, k1, c2, c3)
    b0, b1, b2, b3 = _philox(2 * group + 1, k0, k1, c2, c3)
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
    if DTYPE == tl.bfloat16:
        t = x.to(tl.uint32, bitcast=True)
        if not STOCHASTIC:
            add = ((t >> 16) & 1) + 0x7FFF
        elif FLIP:
            add = ~word & 0xFFFF
        else:
            add = word & 0xFFFF
        y = ((t + add) & 0xFFFF0000).to(tl.float32, bitcast=True)
        return tl.where(x == x, y, x).to(DTYPE)
    elif STOCHASTIC:
        # 1 + 2r·2**-23 with 12 random bits r, less its middle: an odd multiple of 2**-23 up to 4095
        dither = (0x3F800000 | (word & 0x1FFE)).to(tl.float32, bitcast=True)
        if FLIP:
            dither = MIDDLE - dither
        else:
            dither = dither - MIDDLE
        unit = tl.maximum((x.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), TINY)
        return tl.fma(dither, unit, x).to(DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def _accumulate(acc, u, alpha):
    """acc + alpha·u: rounded once in fp32, twice (product, sum) in fp64."""
    if acc.dtype == tl.float64:
        return acc + u.to(tl.float64) * alpha
    else:
        return tl.fma(u, tl.zeros_like(u) + alpha, acc)


@triton.jit
def _place(n, base, first, SHIFT: tl.constexpr, WHOLE: tl.constexpr, GROUPS: tl.constexpr):
    """This program's groups of eight elements, their indices, and which of these exist."""
    start = (first + tl.program_id(0)).to(tl.int64) * GROUPS
    group = (base + start).to(tl.uint64) + tl.arange(0, GROUPS).to(tl.uint64)
    index = start * 8 - SHIFT + tl.arange(0, 8 * GROUPS)
    if WHOLE:
        inside = tl.full([8 * GROUPS], True, tl.int1)
    else:
        inside = (index >= 0) & (index < n)
    return group, index, inside


@triton.jit(do_not_specialize=["base", "first", "k0", "k1", "c2", "c3", "m2", "m3", "limit"])
def _add_noise(
    out_ptr, minus_ptr, x_ptr, coeffs_ptr, n, base, first, alpha, decay, threshold,
    k0, k1, c2, c3, m2, m3, limit,
    SHIFT: tl.constexpr, WHOLE: tl.constexpr, PROBES: tl.constexpr, POINTER: tl.constexpr, PAIR: tl.constexpr, LOAD: tl.constexpr, DECAY: tl.constexpr,
    MASK: tl.constexpr, RADEMACHER: tl.constexpr, STOCHASTIC: tl.constexpr, FLIP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    # base: the first element's offset, rounded down to a multiple of 8, over 8.
    SIZE: tl.constexpr = GROUPS * 8
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    k0, k1, c2, c3 = k0.to(tl.uint32), k1.to(tl.uint32), c2.to(tl.uint32), c3.to(tl.uint32)
    group, index, inside = _place(n, base, first, SHIFT, WHOLE, GROUPS)
    if LOAD:
        x = tl.load(x_ptr + index, mask=inside, other=0).to(WIDE)
    else:
        x = tl.zeros([SIZE], WIDE)
    if POINTER:  # fp64 coefficients, or several: decay, threshold, alpha of each probe
        decay = tl.load(coeffs_ptr).to(WIDE)
        threshold = tl.load(coeffs_ptr + 1).to(WIDE)
        alpha = tl.load(coeffs_ptr + 2).to(WIDE)
    acc = x
    if DECAY:
        acc = x * decay
    if MASK == 1:
        kept = tl.abs(x) <= threshold
    elif MASK == 2:
        kept = _words(group, k0, k1, m2.to(tl.uint32), m3.to(tl.uint32), SIZE) <= limit.to(tl.uint32)
    u, word = _noise(group, k0, k1, c2, c3, RADEMACHER, SIZE)
    if MASK != 0:
        u = tl.where(kept, u, 0.0)
    acc = _accumulate(acc, u, alpha)
    for k in range(1, PROBES):
        v, _ = _noise(group, k0, k1, c2, (c3 + 16 * k).to(tl.uint32), RADEMACHER, SIZE)
        if MASK != 0:
            v = tl.where(kept, v, 0.0)
        acc = _accumulate(acc, v, tl.load(coeffs_ptr + 2 + k).to(WIDE))
    tl.store(out_ptr + index, _quantize(acc, word, DTYPE, STOCHASTIC, FLIP), mask=inside)
    if PAIR:
        acc = _accumulate(x, u, -alpha)
        tl.store(minus_ptr + index, _quantize(acc, word, DTYPE, STOCHASTIC, not FLIP), mask=inside)


@triton.jit(do_not_specialize=["base", "first", "k0", "k1", "c2", "c3"])
def _add(
    x_ptr, delta_ptr, coeffs_ptr, n, base, first, alpha, decay, k0, k1, c2, c3,
    SHIFT: tl.constexpr, WHOLE: tl.constexpr, DECAY: tl.constexpr, STOCHASTIC: tl.constexpr, FLIP: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = GROUPS * 8
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    group, index, inside = _place(n, base, first, SHIFT, WHOLE, GROUPS)
    acc = tl.load(x_ptr + index, mask=inside, other=0).to(WIDE)
    if WIDE == tl.float64:
        decay = tl.load(coeffs_ptr)
        alpha = tl.load(coeffs_ptr + 1)
    if DECAY:
        acc = acc * decay
    acc = _accumulate(acc, tl.load(delta_ptr + index, mask=inside, other=0), alpha)
    word = tl.zeros([SIZE], tl.uint32)
    if STOCHASTIC:
        word = _words(group, k0.to(tl.uint32), k1.to(tl.uint32), c2.to(tl.uint32), c3.to(tl.uint32), SIZE)
    tl.store(x_ptr + index, _quantize(acc, word, DTYPE, STOCHASTIC, FLIP), mask=inside)


def _tiles(n: int, shift: int) -> list[tuple[int, int, bool]]:
    """Launches (first tile, tiles, whole): whole tiles need no bounds, which saves a tenth of the time."""
    size = GROUPS * 8
    whole = n // size if shift == 0 else 0
    rest = triton.cdiv(n + shift, size) - whole
    return [launch for launch in ((0, whole, True), (whole, rest, False)) if launch[1]]


def _coeffs(like: Tensor, *values: float) -> Tensor:
    """Coefficients in fp64 on the device: a launch passes Python floats as fp32."""
    return torch.tensor(values, dtype=torch.float64).to(like.device, non_blocking=True)


def fill_(out: Tensor, key: Key, *, offset: int, distribution: Distribution) -> None:
    """out[i] ← u[offset + i]; out is flat fp32."""
    _launch(out, None, None, key, (1.0,), offset, 1.0, None, distribution, False, False)


def add_noise_(
    out: Tensor,
    x: Tensor,
    key: Key,
    alphas: tuple[float, ...],
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


def _launch(
    out: Tensor,
    minus: Tensor | None,
    x: Tensor | None,
    key: Key,
    alphas: tuple[float, ...],
    offset: int,
    decay: float,
    mask: Mask | None,
    distribution: Distribution,
    stochastic: bool,
    flip: bool,
) -> None:
    threshold = mask.threshold if isinstance(mask, Magnitude) else 0.0
    mask_key, limit = (mask.key, mask.limit) if isinstance(mask, Bernoulli) else (key, 0)
    if mask_key.seed != key.seed:
        raise ValueError(f"noise and mask of one step share a seed, got {key.seed} and {mask_key.seed}")
    n, shift = out.numel(), offset % 8
    pointer = len(alphas) > 1 or out.dtype == torch.float64
    coeffs = _coeffs(out, decay, threshold, *alphas) if pointer else out
    for first, tiles, whole in _tiles(n, shift):
        _add_noise[(tiles,)](
            out, out if minus is None else minus, out if x is None else x, coeffs, n, offset // 8, first,
            alphas[0], decay, threshold, *key.words, *mask_key.words[2:], limit,
            SHIFT=shift, WHOLE=whole, PROBES=len(alphas), POINTER=pointer, PAIR=minus is not None, LOAD=x is not None,
            DECAY=decay != 1.0, MASK=MASKS[type(mask)], RADEMACHER=distribution == Distribution.RADEMACHER,
            STOCHASTIC=stochastic, FLIP=flip, GROUPS=GROUPS, num_warps=WARPS, enable_fp_fusion=False,
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
    n, shift = x.numel(), offset % 8
    coeffs = _coeffs(x, decay, alpha) if x.dtype == torch.float64 else x
    for first, tiles, whole in _tiles(n, shift):
        _add[(tiles,)](
            x, delta, coeffs, n, offset // 8, first, alpha, decay, *key.words,
            SHIFT=shift, WHOLE=whole, DECAY=decay != 1.0,
            STOCHASTIC=rounding == Rounding.STOCHASTIC and x.dtype.itemsize == 2,
            FLIP=flip, GROUPS=GROUPS, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
