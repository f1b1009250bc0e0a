"""The slow, obvious version of every kernel, in numpy.

Each line here is a line of ``docs/noise.md``.  The compiled CPU loop and the
Triton kernel are tested against this file to the bit: all arithmetic is integer
arithmetic or IEEE fp32 with every rounding stated (``fma`` rounds once).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..noise import ROUNDING, Distribution, Key, Rounding
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

U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]
MASK32 = np.uint64(0xFFFFFFFF)


def philox(c0: U32, c1: U32, c2: int, c3: int, k0: int, k1: int) -> tuple[U32, U32, U32, U32]:
    """Philox-4x32-10 of the counters (c0, c1, c2, c3) under the key (k0, k1)."""
    a, b = c0.astype(np.uint64), c1.astype(np.uint64)
    c, d = np.full_like(a, c2), np.full_like(a, c3)
    for r in range(10):
        p, q = a * np.uint64(MULTIPLIERS[0]), c * np.uint64(MULTIPLIERS[1])
        x0 = np.uint64((k0 + r * WEYL[0]) & 0xFFFFFFFF)
        x1 = np.uint64((k1 + r * WEYL[1]) & 0xFFFFFFFF)
        a, b, c, d = (q >> np.uint64(32)) ^ b ^ x0, q & MASK32, (p >> np.uint64(32)) ^ d ^ x1, p & MASK32
    return tuple(x.astype(np.uint32) for x in (a, b, c, d))  # type: ignore[return-value]


def groups(key: Key, first: int, count: int) -> U32:
    """The four words of each counter first, first + 1, …: shape (count, 4)."""
    k0, k1, c2, c3 = key.words
    counters = [i & 0xFFFFFFFFFFFFFFFF for i in range(first, first + count)]
    index = np.array(counters, dtype=np.uint64)
    low, high = (index & MASK32).astype(np.uint32), (index >> np.uint64(32)).astype(np.uint32)
    return np.stack(philox(low, high, c2, c3, k0, k1), axis=1)


def words(key: Key, offset: int, n: int) -> U32:
    """One word an element: element i has word i mod 4 of counter i div 4."""
    first = offset // 4
    count = (offset + n + 3) // 4 - first
    return groups(key, first, count).reshape(-1)[offset - 4 * first :][:n]


def fma(a: F32, b: F32 | float, c: F32 | float) -> F32:
    """a·b + c with one rounding: exact product and round-to-odd sum in fp64, then fp32."""
    x, y, z = (np.asarray(v, dtype=np.float32).astype(np.float64) for v in (a, b, c))
    with np.errstate(invalid="ignore", over="ignore"):
        p = x * y
        s = p + z
        v = s - p
        error = (p - (s - v)) + (z - v)  # of the sum, exactly
        bits = s.view(np.int64)
        toward = np.where((error > 0) == (s > 0), 1, -1)
        odd = np.where(np.isfinite(s) & (error != 0) & (bits & 1 == 0), bits + toward, bits)
        return odd.view(np.float64).astype(np.float32)


def polynomial(coefficients: tuple[float, ...], x: F32) -> F32:
    """Horner's rule, coefficients from the constant up."""
    result = np.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result = fma(result, x, c)
    return result


def box_muller(a: U32, b: U32) -> tuple[F32, F32]:
    """Two independent normals from two words: the radius from a, the angle from b."""
    u = np.abs(a.view(np.int32).astype(np.float32)) + np.float32(0.5)  # of 2**31
    bits = u.view(np.int32)
    e = (bits - np.int32(LOG_BREAK)) & np.int32(-(1 << 23))  # the exponent, in its place
    f = fma((bits - e).view(np.float32), 2.0**-31, -ONE)
    radius = np.sqrt(fma(e.astype(np.float32), LN_U, f * polynomial(LOG, f)))
    radius = (radius.view(np.uint32) ^ (a & np.uint32(1 << 31))).view(np.float32)
    t = b.view(np.int32).astype(np.float32) * np.float32(2.0**-32)
    square = t * t
    return radius * polynomial(COS, square), radius * (t * polynomial(SIN, square))


def draw(key: Key, offset: int, n: int, distribution: Distribution = Distribution.NORMAL) -> F32:
    """Noise of n elements from a global offset, fp32."""
    first = offset // 4
    w = groups(key, first, (offset + n + 3) // 4 - first)
    if distribution == Distribution.RADEMACHER:
        z = np.where(w >> np.uint32(31), np.float32(-1), np.float32(1)).astype(np.float32)
    else:
        z = np.stack([*box_muller(w[:, 0], w[:, 1]), *box_muller(w[:, 2], w[:, 3])], axis=1)
    return z.reshape(-1)[offset - 4 * first :][:n]


def quantize(x: F32, dtype: torch.dtype, word: U32 | None) -> F32:
    """fp32 values on the grid of a 16-bit dtype: to nearest even, or stochastic by each element's word."""
    if dtype.itemsize != 2:
        return x
    if word is not None:  # add random bits below the cut, then cut
        below = np.uint32(0xFFFF if dtype == torch.bfloat16 else 0x1FFF)
        y = ((x.view(np.uint32) + (word & below)) & ~below).view(np.float32)
        x = np.where(np.isnan(x), x, y)
    return torch.from_numpy(x).to(dtype).float().numpy()


def keep(x: NDArray[np.floating], mask: Mask | None, offset: int) -> NDArray[np.bool_]:
    """Which elements a mask keeps."""
    match mask:
        case Magnitude(threshold):
            return np.asarray(np.abs(x) <= threshold)
        case Bernoulli(key, limit):
            return np.asarray(words(key, offset, x.size) <= np.uint32(limit))
    return np.ones(x.shape, dtype=bool)


def _probe(key: Key, k: int, offset: int, kept: NDArray[np.bool_], distribution: Distribution) -> F32:
    """u of probe ``key.probe + k``, 0 where the mask does not keep."""
    u = draw(key.to(probe=key.probe + k), offset, kept.size, distribution)
    return np.where(kept, u, np.float32(0))


def _finish(x: NDArray[np.floating], dtype: torch.dtype, word: U32 | None) -> Tensor:
    return torch.from_numpy(quantize(np.ascontiguousarray(x), dtype, word)).to(dtype)


def _load(x: Tensor) -> NDArray[np.floating]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.detach().to("cpu", wide).numpy()


def fill_(out: Tensor, key: Key, alphas: tuple[float, ...], *, offset: int, distribution: Distribution) -> None:
    """out[i] ← Σₖ alphas[k]·u_{probe + k}[offset + i], rounded to nearest; out is flat."""
    out.zero_()
    add_noise_(out, out, key, alphas, offset=offset, decay=1.0, mask=None, distribution=distribution,
               rounding=Rounding.NEAREST)  # fmt: skip


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
    minus ← round(x - alphas[0]·u) too, with the bits complemented.
    """
    if minus is not None:
        add_noise_(minus, x, key, (-alphas[0],), offset=offset, decay=1.0, mask=mask, distribution=distribution,
                   rounding=rounding, flip=not flip)  # fmt: skip
    value = _load(x)
    wide = value.dtype.type
    kept = keep(value, mask, offset)
    acc = value * wide(decay)
    for k, alpha in enumerate(alphas):
        u = _probe(key, k, offset, kept, distribution)
        acc = acc + wide(alpha) * u.astype(wide) if wide is np.float64 else fma(u, alpha, acc)
    word = words(key, offset, x.numel()) ^ np.uint32(0xFFFFFFFF if flip else 0)
    out.copy_(_finish(acc, out.dtype, word if rounding == Rounding.STOCHASTIC else None))


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
    value = _load(x)
    wide = value.dtype.type
    d = delta.detach().cpu().numpy()
    acc = value * wide(decay)
    acc = acc + wide(alpha) * d.astype(wide) if wide is np.float64 else fma(d, alpha, acc)
    word = words(key, offset, x.numel()) ^ np.uint32(0xFFFFFFFF if flip else 0)
    x.copy_(_finish(acc, x.dtype, word if rounding == Rounding.STOCHASTIC else None))


def adam_(
    x: Tensor,
    m: Tensor,
    v: Tensor,
    key: Key,
    scalars: tuple[float, ...],
    constants: tuple[float, ...],
    *,
    offset: int,
    decay: float,
    mask: Mask | None,
    distribution: Distribution,
    rounding: Rounding,
) -> None:
    """Adam's update of flat x, m and v: (taken, -lr, c1, c2, shares), (β1, 1 - β1, β2, 1 - β2, eps) in fp32."""
    taken, rate, c1, c2, *shares = np.array(scalars, dtype=np.float32)
    if taken == 0:
        return
    beta1, rest1, beta2, rest2, eps = np.array(constants, dtype=np.float32)
    value, n = _load(x), x.numel()
    kept = keep(value, mask, offset)
    g = shares[0] * _probe(key, 0, offset, kept, distribution)
    for k in range(1, len(shares)):
        g = fma(_probe(key, k, offset, kept, distribution), shares[k], g)
    first = fma(_load(m), beta1, rest1 * g)
    second = fma(_load(v), beta2, rest2 * (g * g))
    d = (first * c1) / (np.sqrt(second * c2) + eps)
    acc = fma(d, rate, value * np.float32(decay))
    x.copy_(_finish(acc, x.dtype, words(key, offset, n) if rounding == Rounding.STOCHASTIC else None))
    word = words(key.to(stream=ROUNDING), offset, n)
    m.copy_(_finish(first, m.dtype, word))
    v.copy_(_finish(second, v.dtype, word >> np.uint32(16)))
