"""The compiled CPU loop (numba), equal to ``reference.py`` to the bit."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...noise import ROUNDING, Draw, Rounding
from ..shared.cpu import (
    KINDS,
    TILE,
    accumulate,
    array,
    complement,
    draw_words,
    f32,
    i64,
    jit,
    key_words,
    narrow,
    place,
    run_at,
    split,
    u32,
    u64,
    widen,
)
from ..shared.dispatch import PIECE
from .reference import product


@jit
def add_delta(x, delta, kind, wide, start, stop, where, alpha, decay, stochastic, flip, key):  # type: ignore[no-untyped-def]
    """x ← round(decay·x + alpha·delta) on [start, stop)."""
    words = np.empty(TILE + 8, u32)
    acc = np.empty(TILE, wide.dtype)
    a = start
    while a < stop:
        first, n = run_at(where, a, stop)
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
        a += n


def add_(
    x: Tensor, delta: Tensor, alpha: float, draw: Draw, *, decay: float, rounding: Rounding, flip: bool = False
) -> None:
    """x ← round(decay·x + alpha·delta); flat tensors, delta fp32."""
    wide = np.empty(0, np.float64 if x.dtype == torch.float64 else f32)
    target, source, where = array(x), array(delta), place(draw, x.numel())
    key = key_words(draw.key.to(stream=ROUNDING))

    def run(start: int, stop: int) -> None:
        add_delta(
            target, source, KINDS[x.dtype], wide, start, stop, where, wide.dtype.type(alpha),
            wide.dtype.type(decay), rounding == Rounding.STOCHASTIC and x.dtype.itemsize == 2, flip, key,
        )  # fmt: skip

    split(run, x.numel())


def add_outer_(
    x: Tensor,
    z: Tensor,
    v: Tensor,
    alpha: float,
    draw: Draw,
    *,
    decay: float,
    rounding: Rounding,
    flip: bool = False,
) -> None:
    """x ← round(decay·x + alpha·z Vᵀ), some rows at a time; x flat, z (m, r) and v (n, r) fp32."""
    m, n = len(z), len(v)
    rows = max(1, 4096 // n, min(PIECE // n, m // 16))  # at most a sixteenth of a large tensor
    for a in range(0, m, rows):
        part, delta = x[a * n : (a + rows) * n], product(z[a : a + rows], v).view(-1)
        add_(part, delta, alpha, draw.at(a * n), decay=decay, rounding=rounding, flip=flip)
