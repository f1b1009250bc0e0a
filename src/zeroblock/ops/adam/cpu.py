"""The compiled CPU loop (numba), equal to ``reference.py`` to the bit."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ...noise import ROUNDING, Distribution, Draw, Rounding
from ..shared.cpu import (
    BFLOAT,
    KINDS,
    TILE,
    accumulate,
    array,
    draw_probe,
    draw_words,
    f32,
    fma,
    i64,
    jit,
    key_words,
    mask_numbers,
    narrow,
    place,
    run_at,
    select,
    split,
    u32,
    u64,
    widen,
)


@jit
def adam(x, m, v, kind, moment, start, stop, where, key, moment_key, scalars, constants, decay, rademacher, mask,
         threshold, mask_key, limit, stochastic):  # type: ignore[no-untyped-def]  # fmt: skip
    """Adam's update of x, m and v on [start, stop)."""
    words = np.empty(TILE + 8, u32)
    noise = np.empty(TILE + 8, f32)
    kept = np.ones(TILE, np.bool_)
    value, g, mean, square = np.empty(TILE, f32), np.empty(TILE, f32), np.empty(TILE, f32), np.empty(TILE, f32)
    rate, c1, c2 = scalars[1], scalars[2], scalars[3]
    shares = scalars[4:]
    beta1, rest1, beta2, rest2, eps = constants[0], constants[1], constants[2], constants[3], constants[4]
    a = start
    while a < stop:
        first, n = run_at(where, a, stop)
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
        a += n


def adam_(
    x: Tensor,
    m: Tensor,
    v: Tensor,
    draw: Draw,
    scalars: tuple[float, ...],
    constants: tuple[float, ...],
    *,
    decay: float,
    rounding: Rounding,
) -> None:
    """Adam's update of flat x, m and v: (taken, -lr, c1, c2, shares), (β1, 1 - β1, β2, 1 - β2, eps) in fp32."""
    if scalars[0] == 0:
        return
    mask, key, moment_key = mask_numbers(draw), key_words(draw.key), key_words(draw.key.to(stream=ROUNDING))
    arrays, where = (array(x), array(m), array(v)), place(draw, x.numel())
    numbers, fixed = np.array(scalars, dtype=f32), np.array(constants, dtype=f32)

    def run(start: int, stop: int) -> None:
        adam(
            *arrays, KINDS[x.dtype], KINDS[m.dtype], start, stop, where, key, moment_key, numbers, fixed,
            f32(decay), draw.distribution == Distribution.RADEMACHER, mask.kind, f32(mask.threshold), mask.words,
            mask.limit, rounding == Rounding.STOCHASTIC and x.dtype.itemsize == 2,
        )  # fmt: skip

    split(run, x.numel())
