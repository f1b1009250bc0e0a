"""The parts of the slow, obvious versions, in numpy: from an address to words, normals and rounded weights.

Each line here is a line of ``docs/noise.md``.  The compiled CPU loops and the
Triton kernels are tested against the references to the bit: all arithmetic is integer
arithmetic or IEEE fp32 with every rounding stated (``fma`` rounds once).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...noise import Distribution, Draw, Key, RandomMask, SmallMask
from .spec import COS, LN_U, LOG, LOG_BREAK, MULTIPLIERS, ONE, SIN, WEYL

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
    k0, k1, c2, c3 = key.read().words
    counters = [i & 0xFFFFFFFFFFFFFFFF for i in range(first, first + count)]
    index = np.array(counters, dtype=np.uint64)
    low, high = (index & MASK32).astype(np.uint32), (index >> np.uint64(32)).astype(np.uint32)
    return np.stack(philox(low, high, c2, c3, k0, k1), axis=1)


def words(key: Key, offset: int, n: int) -> U32:
    """One word per element: element i has word i mod 4 of counter i div 4."""
    first = offset // 4
    count = (offset + n + 3) // 4 - first
    return groups(key, first, count).reshape(-1)[offset - 4 * first :][:n]


def element_words(key: Key, draw: Draw, n: int) -> U32:
    """The words of the first n elements of a draw, under a key."""
    return np.concatenate([words(key, offset, length) for offset, length in draw.runs(n)])


def fma(a: F32, b: F32 | float, c: F32 | float) -> F32:
    """a·b + c with one rounding: exact product and round-to-odd sum in fp64, then fp32."""
    x, y, z = (np.asarray(v, dtype=np.float32).astype(np.float64) for v in (a, b, c))
    with np.errstate(invalid="ignore", over="ignore"):
        p = x * y
        s = p + z
        v = s - p
        error = (p - (s - v)) + (z - v)  # the exact error of the sum
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
    u = np.abs(a.view(np.int32).astype(np.float32)) + np.float32(0.5)  # a uniform number times 2**31
    bits = u.view(np.int32)
    e = (bits - np.int32(LOG_BREAK)) & np.int32(-(1 << 23))  # the exponent, left in place
    f = fma((bits - e).view(np.float32), 2.0**-31, -ONE)
    radius = np.sqrt(fma(e.astype(np.float32), LN_U, f * polynomial(LOG, f)))
    radius = (radius.view(np.uint32) ^ (a & np.uint32(1 << 31))).view(np.float32)
    t = b.view(np.int32).astype(np.float32) * np.float32(2.0**-32)
    square = t * t
    return radius * polynomial(COS, square), radius * (t * polynomial(SIN, square))


def noise(draw: Draw, n: int) -> F32:
    """Noise of the first n elements of a draw, fp32; the mask is ignored."""
    return np.concatenate([_noise(draw, offset, length) for offset, length in draw.runs(n)])


def _noise(draw: Draw, offset: int, n: int) -> F32:
    """Noise of n consecutive addresses."""
    first = offset // 4
    w = groups(draw.key, first, (offset + n + 3) // 4 - first)
    if draw.distribution == Distribution.RADEMACHER:
        z = np.where(w >> np.uint32(31), np.float32(-1), np.float32(1)).astype(np.float32)
    else:
        z = np.stack([*box_muller(w[:, 0], w[:, 1]), *box_muller(w[:, 2], w[:, 3])], axis=1)
    return z.reshape(-1)[offset - 4 * first :][:n]


def quantize(x: F32, dtype: torch.dtype, word: U32 | None) -> F32:
    """fp32 values rounded to the grid of a 16-bit dtype: to nearest even, or stochastically by each element's word."""
    if dtype.itemsize != 2:
        return x
    if word is not None:  # add random bits below the cut, then truncate
        below = np.uint32(0xFFFF if dtype == torch.bfloat16 else 0x1FFF)
        y = ((x.view(np.uint32) + (word & below)) & ~below).view(np.float32)
        x = np.where(np.isnan(x), x, y)
    return torch.from_numpy(x).to(dtype).float().numpy()


def keep(x: NDArray[np.floating], draw: Draw) -> NDArray[np.bool_]:
    """True for the elements that the mask of a draw keeps."""
    match draw.mask:
        case SmallMask(threshold):
            return np.asarray(np.abs(x) <= threshold)
        case RandomMask(key, limit):
            return np.asarray(element_words(key, draw, x.size) <= np.uint32(limit))
    return np.ones(x.shape, dtype=bool)


def probe(draw: Draw, k: int, kept: NDArray[np.bool_]) -> F32:
    """u_k, with 0 for the elements that are not kept."""
    return np.where(kept, noise(draw.probe(k), kept.size), np.float32(0))


def narrowed(x: NDArray[np.floating], dtype: torch.dtype, word: U32 | None) -> Tensor:
    """Wider results, rounded to a tensor of a dtype; see :func:`quantize`."""
    return torch.from_numpy(quantize(np.ascontiguousarray(x), dtype, word)).to(dtype)


def load(x: Tensor) -> NDArray[np.floating]:
    """The elements of a tensor in the precision of the computation."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.detach().to("cpu", wide).numpy()
