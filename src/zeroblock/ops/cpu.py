"""The compiled CPU loop (numba), equal to ``reference.py`` to the bit.

Work is cut into tiles of 1,024 elements.  A tile's noise lives in a small buffer
that stays in the L1/L2 cache, so u is never materialised, and every inner loop is
free of branches so that LLVM vectorises it.  Threads are ours rather than
numba's: its default layer aborts when two Python threads enter it at once.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
from collections.abc import Callable

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic
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

TILE = 1024
SPLIT = 1 << 16  # elements below which a second thread costs more than it saves
jit = functools.partial(numba.njit, nogil=True, cache=True, error_model="numpy", boundscheck=False)
inline = functools.partial(numba.njit, nogil=True, cache=True, error_model="numpy", inline="always")
u32, i32, u64, i64, f32 = np.uint32, np.int32, np.uint64, np.int64, np.float32

M0, M1 = u64(MULTIPLIERS[0]), u64(MULTIPLIERS[1])
W0, W1 = u32(WEYL[0]), u32(WEYL[1])
L = tuple(f32(c) for c in LOG)
S = tuple(f32(c) for c in SIN)
C = tuple(f32(c) for c in COS)
K = f32(LN_U)
BREAK = i32(LOG_BREAK)
MINUS_ONE = f32(-ONE)
TINY = f32(2.0**-14)  # the smallest normal fp16
NONE, MAGNITUDE, BERNOULLI = range(3)
MASKS = {type(None): NONE, Magnitude: MAGNITUDE, Bernoulli: BERNOULLI}
SINGLE, DOUBLE, BFLOAT, HALF = range(4)


@intrinsic
def fma(typingctx, a, b, c):  # type: ignore[no-untyped-def]
    """a·b + c: rounded once in fp32, twice (product, sum) in fp64."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        if c == types.float32:
            return builder.fma(*args)
        return builder.fadd(builder.fmul(args[0], args[1]), args[2])

    return c(c, c, c), generate


def _bitcast(to: types.Type) -> Callable:
    @intrinsic
    def cast(typingctx, x):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return builder.bitcast(args[0], context.get_value_type(to))

        return to(x), generate

    return cast


as_u32, as_i32, as_f32 = _bitcast(types.uint32), _bitcast(types.int32), _bitcast(types.float32)


@inline
def philox(c0, c1, c2, c3, k0, k1):  # type: ignore[no-untyped-def]
    for _ in range(10):
        p = u64(c0) * M0
        q = u64(c2) * M1
        c0, c1, c2, c3 = (
            u32(q >> u64(32)) ^ c1 ^ k0,
            u32(q),
            u32(p >> u64(32)) ^ c3 ^ k1,
            u32(p),
        )
        k0 = u32(k0 + W0)
        k1 = u32(k1 + W1)
    return c0, c1, c2, c3


@inline
def box_muller(a, b):  # type: ignore[no-untyped-def]
    u = f32(abs(f32(as_i32(a))) + f32(0.5))
    bits = as_i32(u)
    e = i32(i32(bits - BREAK) & i32(-(1 << 23)))
    f = fma(as_f32(i32(bits - e)), f32(2.0**-31), MINUS_ONE)
    p = L[8]
    p = fma(p, f, L[7])
    p = fma(p, f, L[6])
    p = fma(p, f, L[5])
    p = fma(p, f, L[4])
    p = fma(p, f, L[3])
    p = fma(p, f, L[2])
    p = fma(p, f, L[1])
    p = fma(p, f, L[0])
    radius = f32(np.sqrt(fma(f32(e), K, f32(f * p))))
    radius = as_f32(u32(as_u32(radius) ^ u32(a & u32(1 << 31))))
    t = f32(f32(as_i32(b)) * f32(2.0**-32))
    v = f32(t * t)
    s = fma(fma(fma(fma(S[4], v, S[3]), v, S[2]), v, S[1]), v, S[0])
    c = fma(fma(fma(fma(C[4], v, C[3]), v, C[2]), v, C[1]), v, C[0])
    return f32(radius * c), f32(radius * f32(t * s))


@jit
def draw_words(out, first, count, k0, k1, c2, c3):  # type: ignore[no-untyped-def]
    """out[4g + j] ← word j of counter first + g."""
    for g in range(count):
        i = u64(first + u64(g))
        a, b, c, d = philox(u32(i), u32(i >> u64(32)), c2, c3, k0, k1)
        out[4 * g] = a
        out[4 * g + 1] = b
        out[4 * g + 2] = c
        out[4 * g + 3] = d


@jit
def draw_noise(out, words, count, rademacher):  # type: ignore[no-untyped-def]
    """out ← noise from words, both of 4·count elements."""
    if rademacher:
        for i in range(4 * count):
            out[i] = f32(1) - f32(2) * f32(words[i] >> u32(31))
    else:
        for p in range(2 * count):
            x, y = box_muller(words[2 * p], words[2 * p + 1])
            out[2 * p] = x
            out[2 * p + 1] = y


@inline
def half_to_float(h):  # type: ignore[no-untyped-def]
    magnitude = u32(h & u32(0x7FFF))
    sign = u32(u32(h & u32(0x8000)) << u32(16))
    normal = u32(u32(magnitude << u32(13)) + u32(112 << 23))
    small = as_u32(f32(f32(i32(magnitude)) * f32(2.0**-24)))
    special = u32(u32(magnitude << u32(13)) | u32(0x7F800000))
    bits = normal if magnitude >= u32(0x400) else small
    bits = special if magnitude >= u32(0x7C00) else bits
    return as_f32(u32(bits | sign))


@inline
def to_bfloat(x, word, stochastic):  # type: ignore[no-untyped-def]
    t = as_u32(x)
    add = u32(word & u32(0xFFFF)) if stochastic else u32(u32(0x7FFF) + u32(u32(t >> u32(16)) & u32(1)))
    return u32(u32(t + add) >> u32(16)) if x == x else u32(0x7FC0)


@inline
def to_half(x, word, stochastic):  # type: ignore[no-untyped-def]
    cut = as_f32(u32(u32(as_u32(x) + u32(word & u32(0x1FFF))) & u32(0xFFFFE000)))
    x = cut if stochastic and x == x else x
    t = as_u32(x)
    magnitude = u32(t & u32(0x7FFFFFFF))
    rounded = u32(magnitude + u32(u32(0xFFF) + u32(u32(magnitude >> u32(13)) & u32(1))))
    normal = u32(u32(rounded - u32(112 << 23)) >> u32(13))
    small = u32(as_u32(f32(min(as_f32(magnitude), TINY) + f32(0.5))) - u32(0x3F000000))  # units of 2**-24
    h = normal if as_f32(magnitude) >= TINY else small
    h = u32(0x7C00) if rounded >= u32(0x47800000) else h
    h = h if x == x else u32(0x7E00)
    return u32(h | u32(u32(t >> u32(16)) & u32(0x8000)))


@jit
def widen(out, x, n, kind):  # type: ignore[no-untyped-def]
    if kind == BFLOAT:
        for i in range(n):
            out[i] = as_f32(u32(u32(x[i]) << u32(16)))
    elif kind == HALF:
        for i in range(n):
            out[i] = half_to_float(u32(x[i]))
    else:
        for i in range(n):
            out[i] = x[i]


@jit
def narrow(out, x, words, skip, n, kind, stochastic):  # type: ignore[no-untyped-def]
    if kind == BFLOAT:
        for i in range(n):
            out[i] = np.uint16(to_bfloat(f32(x[i]), words[skip + i], stochastic))
    elif kind == HALF:
        for i in range(n):
            out[i] = np.uint16(to_half(f32(x[i]), words[skip + i], stochastic))
    else:
        for i in range(n):
            out[i] = x[i]


@jit
def complement(words):  # type: ignore[no-untyped-def]
    for i in range(len(words)):
        words[i] = u32(~words[i])


@jit
def accumulate(acc, u, skip, n, alpha):  # type: ignore[no-untyped-def]
    for i in range(n):
        acc[i] = fma(acc.dtype.type(u[skip + i]), alpha, acc[i])


# select and draw_probe are inlined: as functions of their own their arrays might overlap, which forbids vectors
@inline
def select(kept, value, words, skip, n, first, mask, threshold, key, limit):  # type: ignore[no-untyped-def]
    """kept ← which elements of a tile the mask keeps; overwrites words."""
    if mask == MAGNITUDE:
        for i in range(n):
            kept[i] = abs(value[i]) <= threshold
    elif mask == BERNOULLI:
        draw_words(words, first >> u64(2), (n + skip + 3) // 4, key[0], key[1], key[2], key[3])
        for i in range(n):
            kept[i] = words[skip + i] <= limit


@inline
def draw_probe(noise, words, kept, skip, n, first, key, k, rademacher, mask):  # type: ignore[no-untyped-def]
    """Noise, 0 where not kept, and words of a tile's probe k."""
    count = (n + skip + 3) // 4
    draw_words(words, first >> u64(2), count, key[0], key[1], key[2], u32(key[3] + u32(16 * k)))
    draw_noise(noise, words, count, rademacher)
    if mask != NONE:
        for i in range(n):
            noise[skip + i] = noise[skip + i] if kept[i] else f32(0)


@jit
def add_noise(out, minus, x, kind, wide, start, stop, offset, key, alphas, decay, rademacher, mask, threshold, mask_key,
              limit, stochastic, flip):  # type: ignore[no-untyped-def]  # fmt: skip
    """out ← round(decay·x + Σ alphas[k]·u_k) on [start, stop); minus, if any, ← round(x - alphas[0]·u_0)."""
    words = np.empty(TILE + 8, u32)
    noise = np.empty(TILE + 8, f32)
    kept = np.ones(TILE, np.bool_)
    value = np.empty(TILE, wide.dtype)
    acc = np.empty(TILE, wide.dtype)
    for a in range(start, stop, TILE):
        n = min(TILE, stop - a)
        first = u64(offset + u64(a))
        skip = i64(first & u64(3))
        count = (n + skip + 3) // 4
        widen(value, x[a : a + n], n, kind)
        for i in range(n):
            acc[i] = value[i] * decay
        select(kept, value, words, skip, n, first, mask, threshold, mask_key, limit)
        # the sum runs over probes from the first, but the first probe's words are drawn
        # last, once more, when there are several: they carry the rounding bits
        for k in range(len(alphas)):
            draw_probe(noise, words, kept, skip, n, first, key, k, rademacher, mask)
            accumulate(acc, noise, skip, n, alphas[k])
        if stochastic:
            if len(alphas) > 1:
                draw_words(words, first >> u64(2), count, key[0], key[1], key[2], key[3])
            if flip:
                complement(words)
        narrow(out[a : a + n], acc, words, skip, n, kind, stochastic)
        if len(minus):
            for i in range(n):
                acc[i] = value[i]
            accumulate(acc, noise, skip, n, -alphas[0])
            complement(words)
            narrow(minus[a : a + n], acc, words, skip, n, kind, stochastic)


@jit
def add_delta(x, delta, kind, wide, start, stop, offset, alpha, decay, stochastic, flip, key):  # type: ignore[no-untyped-def]
    """x ← round(decay·x + alpha·delta) on [start, stop)."""
    words = np.empty(TILE + 8, u32)
    acc = np.empty(TILE, wide.dtype)
    for a in range(start, stop, TILE):
        n = min(TILE, stop - a)
        first = u64(offset + u64(a))
        skip = i64(first & u64(3))
        widen(acc, x[a : a + n], n, kind)
        for i in range(n):
            acc[i] = acc[i] * decay
        accumulate(acc, delta, a, n, alpha)
        if stochastic:
            draw_words(words, first >> u64(2), (n + skip + 3) // 4, key[0], key[1], key[2], key[3])
            if flip:
                complement(words)
        narrow(x[a : a + n], acc, words, skip, n, kind, stochastic)


@jit
def adam(x, m, v, kind, moment, start, stop, offset, key, moment_key, scalars, constants, decay, rademacher, mask,
         threshold, mask_key, limit, stochastic):  # type: ignore[no-untyped-def]  # fmt: skip
    """Adam's update of x, m and v on [start, stop)."""
    words = np.empty(TILE + 8, u32)
    noise = np.empty(TILE + 8, f32)
    kept = np.ones(TILE, np.bool_)
    value, g, mean, square = np.empty(TILE, f32), np.empty(TILE, f32), np.empty(TILE, f32), np.empty(TILE, f32)
    rate, c1, c2 = scalars[1], scalars[2], scalars[3]
    shares = scalars[4:]
    beta1, rest1, beta2, rest2, eps = constants[0], constants[1], constants[2], constants[3], constants[4]
    for a in range(start, stop, TILE):
        n = min(TILE, stop - a)
        first = u64(offset + u64(a))
        skip = i64(first & u64(3))
        count = (n + skip + 3) // 4
        widen(value, x[a : a + n], n, kind)
        widen(mean, m[a : a + n], n, moment)
        widen(square, v[a : a + n], n, moment)
        select(kept, value, words, skip, n, first, mask, threshold, mask_key, limit)
        draw_probe(noise, words, kept, skip, n, first, key, 0, rademacher, mask)
        for i in range(n):
            g[i] = shares[0] * noise[skip + i]
        for k in range(1, len(shares)):
            draw_probe(noise, words, kept, skip, n, first, key, k, rademacher, mask)
            accumulate(g, noise, skip, n, shares[k])
        for i in range(n):
            mean[i] = fma(mean[i], beta1, rest1 * g[i])
            square[i] = fma(square[i], beta2, rest2 * (g[i] * g[i]))
            d = (mean[i] * c1) / (np.sqrt(square[i] * c2) + eps)
            value[i] = fma(d, rate, value[i] * decay)
        if stochastic and len(shares) > 1:
            draw_words(words, first >> u64(2), count, key[0], key[1], key[2], key[3])
        narrow(x[a : a + n], value, words, skip, n, kind, stochastic)
        if moment == BFLOAT:
            draw_words(words, first >> u64(2), count, moment_key[0], moment_key[1], moment_key[2], moment_key[3])
        narrow(m[a : a + n], mean, words, skip, n, moment, True)
        for i in range(n):
            words[skip + i] = words[skip + i] >> u32(16)
        narrow(v[a : a + n], square, words, skip, n, moment, True)


@functools.cache
def _pool(threads: int) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="zeroblock")


os.register_at_fork(after_in_child=_pool.cache_clear)


def _split(run: Callable[[int, int], None], n: int) -> None:
    """run(start, stop) over [0, n), on as many threads as torch may use."""
    pieces = min(torch.get_num_threads(), max(1, n // SPLIT))
    if pieces == 1:
        return run(0, n)
    width = -(-n // pieces // TILE) * TILE
    jobs = [_pool(pieces).submit(run, a, min(a + width, n)) for a in range(0, n, width)]
    for job in jobs:
        job.result()


def _array(x: Tensor) -> np.ndarray:
    x = x.detach()
    return (x.view(torch.uint16) if x.dtype.itemsize == 2 else x).numpy()


def _words(key: Key) -> np.ndarray:
    return np.array(key.words, dtype=u32)


KINDS = {torch.float32: SINGLE, torch.float64: DOUBLE, torch.bfloat16: BFLOAT, torch.float16: HALF}


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
    minus ← round(x - alphas[0]·u) too, from the same draw, with the bits complemented.
    """
    wide = np.empty(0, np.float64 if x.dtype == torch.float64 else f32)
    threshold = mask.threshold if isinstance(mask, Magnitude) else 0.0
    mask_key, limit = (mask.key, mask.limit) if isinstance(mask, Bernoulli) else (key, 0)
    target, source = _array(out), _array(x)
    twin = target[:0] if minus is None else _array(minus)

    def run(start: int, stop: int) -> None:
        add_noise(
            target, twin, source, KINDS[x.dtype], wide, start, stop, u64(offset), _words(key),
            np.array(alphas, dtype=wide.dtype), wide.dtype.type(decay), distribution == Distribution.RADEMACHER,
            MASKS[type(mask)], wide.dtype.type(threshold), _words(mask_key), u32(limit),
            rounding == Rounding.STOCHASTIC and x.dtype.itemsize == 2, flip,
        )  # fmt: skip

    _split(run, x.numel())


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
    wide = np.empty(0, np.float64 if x.dtype == torch.float64 else f32)
    target, source = _array(x), _array(delta)

    def run(start: int, stop: int) -> None:
        add_delta(
            target, source, KINDS[x.dtype], wide, start, stop, u64(offset), wide.dtype.type(alpha),
            wide.dtype.type(decay), rounding == Rounding.STOCHASTIC and x.dtype.itemsize == 2, flip, _words(key),
        )  # fmt: skip

    _split(run, x.numel())


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
    if scalars[0] == 0:
        return
    threshold = mask.threshold if isinstance(mask, Magnitude) else 0.0
    mask_key, limit = (mask.key, mask.limit) if isinstance(mask, Bernoulli) else (key, 0)
    arrays = _array(x), _array(m), _array(v)

    def run(start: int, stop: int) -> None:
        adam(
            *arrays, KINDS[x.dtype], KINDS[m.dtype], start, stop, u64(offset), _words(key),
            _words(key.to(stream=ROUNDING)), np.array(scalars, dtype=f32), np.array(constants, dtype=f32), f32(decay),
            distribution == Distribution.RADEMACHER, MASKS[type(mask)], f32(threshold), _words(mask_key), u32(limit),
            rounding == Rounding.STOCHASTIC and x.dtype.itemsize == 2,
        )  # fmt: skip

    _split(run, x.numel())
