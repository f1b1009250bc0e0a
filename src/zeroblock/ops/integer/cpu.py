"""The compiled CPU loops (numba), equal to ``reference.py`` to the bit.

A tile of integers is unpacked, and the loops of ``noise`` and ``outer`` do the rest: the operations that the reference
applies to a whole matrix, one after another, are applied to a tile while it is in the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...noise import ROUNDING, Distribution, Draw, Rounding
from ..noise import cpu as noise
from ..noise.cpu import add_noise
from ..outer.cpu import add_delta
from ..shared.cpu import (
    HALF,
    KINDS,
    SINGLE,
    TILE,
    MaskNumbers,
    array,
    f32,
    i32,
    inline,
    jit,
    key_words,
    mask_numbers,
    narrow,
    place,
    split,
    u32,
    u64,
    widen,
)
from ..shared.dispatch import Alpha, coefficients
from .layout import Integers
from .reference import MIDDLE

MIDDLE_BITS = i32(0x6600)
"""The bits of MIDDLE in fp16: plus an integer, they are the bits of MIDDLE plus that integer."""
ONE, CENTRE = f32(1), f32(MIDDLE)


class Grid(NamedTuple):
    """Integers in the form that the loops take, in flat arrays.

    Args:
        codes: uint8, with one or two integers in each.
        bits: bits of an integer.
        scales: fp32, one per group.
        zeros: int8, one per group, or none.
        group: integers that share a scale.
        lowest, largest: the range of the integers, in fp32.
    """

    codes: np.ndarray
    bits: int
    scales: np.ndarray
    zeros: np.ndarray
    group: int
    lowest: np.float32
    largest: np.float32

    @classmethod
    def of(cls, stored: Integers) -> Grid:
        codes = stored.codes.detach().view(torch.uint8).view(-1).numpy()
        scales = stored.scales.detach().float().contiguous().view(-1).numpy()
        zeros = codes[:0].view(np.int8) if stored.zeros is None else stored.zeros.contiguous().view(-1).numpy()
        return cls(codes, stored.bits, scales, zeros, stored.group, *map(f32, stored.limits))


class Drawn(NamedTuple):
    """A draw in the form that the loops take."""

    key: np.ndarray
    rademacher: bool
    mask: MaskNumbers

    @classmethod
    def of(cls, draw: Draw) -> Drawn:
        return cls(key_words(draw.key), draw.distribution == Distribution.RADEMACHER, mask_numbers(draw))


# an index that might be negative prevents vectorising; numba knows that one from 0 on, or an unsigned one, is not
@jit
def unpack(q, grid, a, n):  # type: ignore[no-untyped-def]
    """q ← the n integers from a on; with 4 bits, a and n are even."""
    if grid.bits == 8:
        codes = grid.codes[a : a + n]
        for i in range(n):
            q[i] = f32(np.int8(codes[i]))
    else:
        codes = grid.codes[a // 2 : (a + n) // 2]
        for i in range(n // 2):
            both = i32(codes[i])
            q[2 * i] = f32(i32(i32(both & i32(15)) - i32(8)))
            q[2 * i + 1] = f32(i32(i32(both >> i32(4)) - i32(8)))


@jit
def pack(grid, q, a, n):  # type: ignore[no-untyped-def]
    """The n integers from a on ← q."""
    if grid.bits == 8:
        codes = grid.codes[a : a + n]
        for i in range(n):
            codes[i] = np.uint8(i32(q[i]))
    else:
        codes = grid.codes[a // 2 : (a + n) // 2]
        for i in range(n // 2):
            low, high = i32(i32(q[2 * i]) + i32(8)), i32(i32(q[2 * i + 1]) + i32(8))
            codes[i] = np.uint8(i32(low | i32(high << i32(4))))


@inline
def group_at(grid, g, a, n):  # type: ignore[no-untyped-def]
    """Scale and zero point of group g, and where it ends in a tile of the n integers from a on."""
    zero = f32(grid.zeros[g]) if len(grid.zeros) else f32(0)
    return grid.scales[g], zero, min((g + u64(1)) * u64(grid.group) - a, n)


@jit
def scale(q, grid, a, n):  # type: ignore[no-untyped-def]
    """q ← s·(q - z) for the n integers from a on."""
    g, i = a // u64(grid.group), u64(0)
    while i < n:
        s, z, end = group_at(grid, g, a, n)
        for k in range(i, end):
            q[k] = s * f32(q[k] - z)
        g, i = g + u64(1), end


@jit
def aim(change, delta, q, grid, fading, a, n):  # type: ignore[no-untyped-def]
    """change ← delta / s + fading·(q - z) for the n integers from a on."""
    g, i = a // u64(grid.group), u64(0)
    while i < n:
        s, z, end = group_at(grid, g, a, n)
        for k in range(i, end):
            change[k] = delta[k] / s
        if fading != 0:
            for k in range(i, end):
                change[k] = change[k] + f32(fading * f32(q[k] - z))
        g, i = g + u64(1), end


@jit
def expand_tile(out, q, words, grid, kind, a, n):  # type: ignore[no-untyped-def]
    """out ← s·(q - z) of the n integers from a on, rounded to nearest; overwrites q."""
    unpack(q, grid, a, n)
    scale(q, grid, u64(a), u64(n))
    narrow(out, q, words, 0, n, kind, False)


@jit
def expand_range(out, grid, kind, start, stop):  # type: ignore[no-untyped-def]
    """out ← s·(q - z) on [start, stop)."""
    q, words = np.empty(TILE, f32), np.empty(TILE, u32)
    for a in range(start, stop, TILE):
        n = min(TILE, stop - a)
        expand_tile(out[a : a + n], q, words, grid, kind, a, n)


@jit
def perturb_range(out, minus, grid, kind, start, stop, where, drawn, alphas, stochastic, flip):  # type: ignore[no-untyped-def]
    """out ← round(w + alphas[0]·u) on [start, stop); minus, if any, ← round(w - alphas[0]·u)."""
    q, words = np.empty(TILE, f32), np.empty(TILE, u32)
    x, there = np.empty(TILE, out.dtype), where.copy()
    for a in range(start, stop, TILE):
        n = min(TILE, stop - a)
        expand_tile(x, q, words, grid, kind, a, n)
        there[3] = where[3] + u64(a)
        add_noise(
            out[a : a + n], minus[a : a + n], x, kind, q, 0, n, there, drawn.key, alphas, ONE, drawn.rademacher,
            drawn.mask.kind, f32(drawn.mask.threshold), drawn.mask.words, drawn.mask.limit, stochastic, flip,
        )  # fmt: skip


@jit
def move_tile(grid, delta, q, change, half, a, n, where, key, fading, stochastic):  # type: ignore[no-untyped-def]
    """q ← round(q + delta / s + fading·(q - z)) for the n integers from a on; overwrites q, change and half."""
    unpack(q, grid, a, n)
    for i in range(n):
        half[i] = np.uint16(MIDDLE_BITS + i32(q[i]))
    aim(change, delta, q, grid, fading, u64(a), u64(n))
    add_delta(half, change, HALF, q, 0, n, where, ONE, ONE, stochastic, False, key)
    widen(q, half, n, HALF)
    for i in range(n):
        moved = q[i] - CENTRE
        moved = moved if moved > grid.lowest else grid.lowest
        q[i] = moved if moved < grid.largest else grid.largest
    pack(grid, q, a, n)


@jit
def add_range(grid, first, delta, start, stop, where, key, fading, stochastic):  # type: ignore[no-untyped-def]
    """Move the integers first + [start, stop) by delta[start:stop]."""
    q, change, half, there = np.empty(TILE, f32), np.empty(TILE, f32), np.empty(TILE, np.uint16), where.copy()
    for a in range(start, stop, TILE):
        n = min(TILE, stop - a)
        there[3] = where[3] + u64(a)
        move_tile(grid, delta[a : a + n], q, change, half, first + a, n, there, key, fading, stochastic)


@jit
def add_noise_range(grid, start, stop, where, drawn, alphas, key, fading, stochastic):  # type: ignore[no-untyped-def]
    """Move the integers [start, stop) by Σ alphas[k]·u_k."""
    q, change, half, there = np.empty(TILE, f32), np.empty(TILE, f32), np.empty(TILE, np.uint16), where.copy()
    delta = np.empty(TILE, f32)
    for a in range(start, stop, TILE):
        n = min(TILE, stop - a)
        there[3] = where[3] + u64(a)
        delta[:] = 0
        add_noise(
            delta, delta[:0], delta, SINGLE, q, 0, n, there, drawn.key, alphas, ONE, drawn.rademacher,
            drawn.mask.kind, f32(drawn.mask.threshold), drawn.mask.words, drawn.mask.limit, False, False,
        )  # fmt: skip
        move_tile(grid, delta, q, change, half, a, n, there, key, fading, stochastic)


def expand(stored: Integers) -> Tensor:
    """(m, n) s·(q - z), in the dtype of the scales."""
    out = _empty(stored)
    target, grid, kind = array(out.view(-1)), Grid.of(stored), KINDS[out.dtype]
    split(lambda start, stop: expand_range(target, grid, kind, start, stop), out.numel())
    return out


def perturb(stored: Integers, draw: Draw, eps: float, rounding: Rounding) -> Tensor:
    """(m, n) w + eps·u."""
    out = _empty(stored)
    _perturb(out, out[:0], stored, draw, eps, rounding)
    return out


def perturb_pair(stored: Integers, draw: Draw, eps: float, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """(m, n) w + eps·u and w - eps·u."""
    plus, minus = _empty(stored), _empty(stored)
    _perturb(plus, minus, stored, draw, eps, rounding)
    return plus, minus


def add_noise_(stored: Integers, draw: Draw, alpha: Alpha, decay: float, rounding: Rounding) -> None:
    """q ← round(q + Σₖ alpha[k]·u_k / s + (decay - 1)·(q - z)), by bits of the ROUNDING stream."""
    n, grid, drawn = stored.codes.numel() * stored.per_byte, Grid.of(stored), Drawn.of(draw)
    alphas = np.array(coefficients(alpha, noise, stored.codes.device), dtype=f32)
    how = key_words(draw.key.to(stream=ROUNDING)), f32(decay - 1), rounding == Rounding.STOCHASTIC
    where = place(draw, n)
    split(lambda start, stop: add_noise_range(grid, start, stop, where, drawn, alphas, *how), n)


def add_(stored: Integers, delta: Tensor, start: int, draw: Draw, decay: float, rounding: Rounding) -> None:
    """q ← round(q + delta / s + (decay - 1)·(q - z)) for the len(delta) integers from ``start`` on."""
    n, grid, change = len(delta), Grid.of(stored), array(delta.contiguous())
    how = key_words(draw.key.to(stream=ROUNDING)), f32(decay - 1), rounding == Rounding.STOCHASTIC
    where = place(draw.at(start), n)
    split(lambda a, b: add_range(grid, start, change, a, b, where, *how), n)


def _empty(stored: Integers) -> Tensor:
    return torch.empty(stored.shape, dtype=stored.scales.dtype)


def _perturb(out: Tensor, minus: Tensor, stored: Integers, draw: Draw, eps: float, rounding: Rounding) -> None:
    targets = array(out.view(-1)), array(minus.view(-1))
    grid, drawn, kind, alphas = Grid.of(stored), Drawn.of(draw), KINDS[out.dtype], np.array([eps], dtype=f32)
    where, stochastic = place(draw, out.numel()), rounding == Rounding.STOCHASTIC and out.dtype.itemsize == 2

    def run(start: int, stop: int) -> None:
        perturb_range(*targets, grid, kind, start, stop, where, drawn, alphas, stochastic, eps < 0)

    split(run, out.numel())
