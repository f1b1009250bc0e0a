"""The parts of the compiled CPU loops (numba), equal to those of ``reference.py`` to the bit.

Work is cut into tiles of 1,024 elements.  A tile's noise lives in a small buffer
that stays in the L1/L2 cache, so u is never materialised, and every inner loop is
free of branches so that LLVM vectorises it.  Threads are ours rather than
numba's, whose default layer aborts when two Python threads enter it at once.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from ...noise import Draw, Key, RandomMask, Rows, SmallMask
from . import spec
from .spec import COS, LN_U, LOG, LOG_BREAK, MULTIPLIERS, ONE, SIN, WEYL

TILE = 1024
SPLIT = 1 << 16  # elements below which a second thread costs more than it saves
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
NONE, SMALL, RANDOM = range(3)
MASKS = {type(None): NONE, SmallMask: SMALL, RandomMask: RANDOM}
SINGLE, DOUBLE, BFLOAT, HALF = range(4)


@functools.cache
def _stamp() -> tuple[tuple[float, int], ...]:
    """The state of the sources that compiled loops contain: this file, the constants, and the loops of operations."""
    here = Path(__file__)
    found = (path.stat() for path in (Path(spec.__file__), *sorted(here.parents[1].glob("*/cpu.py"))) if path.exists())
    return tuple((status.st_mtime, status.st_size) for status in found)


def jit(function: Callable) -> Any:
    """Compile a loop and keep the result on disk.

    numba compiles a cached function again when the function's own file has changed; the loops of the operations contain
    functions of this file and of each other's too, so the state of all these files goes into their stamps.
    """
    compiled = numba.njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)(function)
    index = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if index is not None:  # private to numba: without it, clear the cache after a change of this file
        index._source_stamp = (index._source_stamp, _stamp())
    return compiled


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
    words = words[skip : skip + n]  # an index that might be negative, such as skip + i, prevents vectorising
    if kind == BFLOAT:
        for i in range(n):
            out[i] = np.uint16(to_bfloat(f32(x[i]), words[i], stochastic))
    elif kind == HALF:
        for i in range(n):
            out[i] = np.uint16(to_half(f32(x[i]), words[i], stochastic))
    else:
        for i in range(n):
            out[i] = x[i]


@jit
def complement(words):  # type: ignore[no-untyped-def]
    for i in range(len(words)):
        words[i] = u32(~words[i])


@jit
def accumulate(acc, u, skip, n, alpha):  # type: ignore[no-untyped-def]
    u = u[skip : skip + n]
    for i in range(n):
        acc[i] = fma(acc.dtype.type(u[i]), alpha, acc[i])


@inline
def run_at(place, a, stop):  # type: ignore[no-untyped-def]
    """The address of element a, and the number of consecutive elements from there, at most a tile."""
    width = i64(place[1])
    i = i64(a) + i64(place[3])
    row = i // width
    column = i - row * width
    first = u64(place[0] + u64(row) * place[2] + u64(column))
    return first, min(TILE, min(stop - a, width - column))


# select and draw_probe are inlined: in separate functions their arrays might overlap, which prevents vectorising
@inline
def select(kept, value, words, skip, n, first, mask, threshold, key, limit):  # type: ignore[no-untyped-def]
    """kept ← True for the elements of a tile that the mask keeps; overwrites words."""
    if mask == SMALL:
        for i in range(n):
            kept[i] = abs(value[i]) <= threshold
    elif mask == RANDOM:
        draw_words(words, first >> u64(2), (n + skip + 3) // 4, key[0], key[1], key[2], key[3])
        for i in range(n):
            kept[i] = words[skip + i] <= limit


@inline
def draw_probe(noise, words, kept, skip, n, first, key, k, rademacher, mask):  # type: ignore[no-untyped-def]
    """noise, words ← those of a tile's probe k, with noise 0 where not kept."""
    count = (n + skip + 3) // 4
    draw_words(words, first >> u64(2), count, key[0], key[1], key[2], u32(key[3] + u32(16 * k)))
    draw_noise(noise, words, count, rademacher)
    if mask != NONE:
        for i in range(n):
            noise[skip + i] = noise[skip + i] if kept[i] else f32(0)


@functools.cache
def _pool(threads: int) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="zeroblock")


os.register_at_fork(after_in_child=_pool.cache_clear)


def split(run: Callable[[int, int], None], n: int) -> None:
    """Call run(start, stop) over [0, n), on up to as many threads as torch uses."""
    pieces = min(torch.get_num_threads(), max(1, n // SPLIT))
    if pieces == 1:
        return run(0, n)
    width = -(-n // pieces // TILE) * TILE
    jobs = [_pool(pieces).submit(run, a, min(a + width, n)) for a in range(0, n, width)]
    for job in jobs:
        job.result()


def array(x: Tensor) -> np.ndarray:
    x = x.detach()
    return (x.view(torch.uint16) if x.dtype.itemsize == 2 else x).numpy()


def key_words(key: Key) -> np.ndarray:
    return np.array(key.read().words, dtype=u32)


KINDS = {torch.float32: SINGLE, torch.float64: DOUBLE, torch.bfloat16: BFLOAT, torch.float16: HALF}


def place(draw: Draw, n: int) -> np.ndarray:
    """The addresses of a draw's n elements, in the form that the loops take: offset, width, stride, first."""
    rows = draw.rows or Rows(width=max(n, 1), stride=0)
    return np.array([draw.offset, rows.width, rows.stride, rows.first], dtype=u64)


class MaskNumbers(NamedTuple):
    """A mask in the form that the loops take."""

    kind: int
    threshold: float
    words: np.ndarray
    limit: np.uint32


def mask_numbers(draw: Draw) -> MaskNumbers:
    """The mask of a draw in the form that the loops take."""
    mask = draw.mask
    threshold = mask.threshold if isinstance(mask, SmallMask) else 0.0
    key, limit = (mask.key, mask.limit) if isinstance(mask, RandomMask) else (draw.key, 0)
    return MaskNumbers(MASKS[type(mask)], threshold, key_words(key), u32(limit))
