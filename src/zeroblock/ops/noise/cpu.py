"""The compiled CPU loop (numba), equal to ``reference.py`` to the bit."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...noise import Distribution, Draw, Rounding
from ..shared.cpu import (
    KINDS,
    TILE,
    accumulate,
    array,
    complement,
    draw_probe,
    draw_words,
    f32,
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
def add_noise(out, minus, x, kind, wide, start, stop, where, key, alphas, decay, rademacher, mask, threshold, mask_key,
              limit, stochastic, flip):  # type: ignore[no-untyped-def]  # fmt: skip
    """out ← round(decay·x + Σ alphas[k]·u_k) on [start, stop); minus, if any, ← round(x - alphas[0]·u_0)."""
    words = np.empty(TILE + 8, u32)
    noise = np.empty(TILE + 8, f32)
    kept = np.ones(TILE, np.bool_)
    value = np.empty(TILE, wide.dtype)
    acc = np.empty(TILE, wide.dtype)
    a = start
    while a < stop:
        first, n = run_at(where, a, stop)
        skip = i64(first & u64(3))
        count = (n + skip + 3) // 4
        widen(value, x[a : a + n], n, kind)
        for i in range(n):
            acc[i] = value[i] * decay
        select(kept, value, words, skip, n, first, mask, threshold, mask_key, limit)
        # the sum runs from the first probe to the last; if there are several, the words of the first
        # are drawn once more at the end, since they carry the rounding bits
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
        a += n


def fill_(out: Tensor, draw: Draw, alphas: tuple[float, ...]) -> None:
    """out[i] ← Σₖ alphas[k]·u_k[i], rounded to nearest; out is flat."""
    out.zero_()
    add_noise_(out, out, draw, alphas, decay=1.0, rounding=Rounding.NEAREST)


def add_noise_(
    out: Tensor,
    x: Tensor,
    draw: Draw,
    alphas: tuple[float, ...],
    *,
    decay: float,
    rounding: Rounding,
    flip: bool = False,
    minus: Tensor | None = None,
) -> None:
    """out ← round(decay·x + Σₖ alphas[k]·u_k), masked; flat tensors, out may be x.

    With ``flip`` the rounding bits are complemented.  With ``minus``:
    minus ← round(x - alphas[0]·u) too, from the same draw, with the bits complemented.
    """
    wide = np.empty(0, np.float64 if x.dtype == torch.float64 else f32)
    mask, key, where = mask_numbers(draw), key_words(draw.key), place(draw, x.numel())
    target, source = array(out), array(x)
    twin = target[:0] if minus is None else array(minus)
    numbers = np.array(alphas, dtype=wide.dtype)

    def run(start: int, stop: int) -> None:
        add_noise(
            target, twin, source, KINDS[x.dtype], wide, start, stop, where, key, numbers,
            wide.dtype.type(decay), draw.distribution == Distribution.RADEMACHER,
            mask.kind, wide.dtype.type(mask.threshold), mask.words, mask.limit,
            rounding == Rounding.STOCHASTIC and x.dtype.itemsize == 2, flip,
        )  # fmt: skip

    split(run, x.numel())
