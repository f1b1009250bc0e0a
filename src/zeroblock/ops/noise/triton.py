"""The GPU kernel (Triton), equal to ``reference.py`` to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ...noise import Distribution, Draw, Rounding
from ..shared import tables
from ..shared.triton import (
    MASKS,
    NUMBERS,
    Place,
    accumulate,
    counters,
    fp64_on_device,
    kept_elements,
    lanes,
    mask_numbers,
    masked_noise,
    quantize,
    stretch,
    tick,
    tile,
)
from .taker import Taker

COLUMNS = tl.constexpr(8)
"""The table's columns per tensor: address, numel, the base, lead and shift of its place, first tile, first element of
its copy, factor."""
COPY_BYTES = 512
"""Copies begin at multiples of this, as separate tensors of torch do."""
LEAST_ROWS = 32
"""The fewest rows of a table, so that few variants of the kernel are compiled."""


@triton.jit(do_not_specialize=[*NUMBERS, "m2", "m3", "limit"])
def _add_noise(
    out_ptr, minus_ptr, x_ptr, coeffs_ptr, clock_ptr, n, base, lead, shift, width, stride, first,
    alpha, decay, threshold, k0, k1, c2, c3, m2, m3, limit,
    ALIGNED: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, PROBES: tl.constexpr, POINTER: tl.constexpr,
    CLOCK: tl.constexpr, PAIR: tl.constexpr, LOAD: tl.constexpr, DECAY: tl.constexpr, MASK: tl.constexpr,
    RADEMACHER: tl.constexpr, STOCHASTIC: tl.constexpr, FLIP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = GROUPS * 8
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    low, high, index, inside = tile(n, base, lead, shift, width, stride, first, ALIGNED, WHOLE, ROWS, GROUPS)
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
        c2 = tick(clock_ptr, c3)
        m2 = tick(clock_ptr, m3)
    k0, k1, c2, c3 = k0.to(tl.uint32), k1.to(tl.uint32), c2.to(tl.uint32), c3.to(tl.uint32)
    acc = x
    if DECAY:
        acc = x * decay
    kept = kept_elements(x, inside, threshold, low, high, k0, k1, m2, m3, limit, MASK, SIZE)
    u, word = masked_noise(low, high, k0, k1, c2, c3, kept, MASK, RADEMACHER, SIZE)
    acc = accumulate(acc, u, alpha)
    for k in range(1, PROBES):
        v, _ = masked_noise(low, high, k0, k1, c2, (c3 + 16 * k).to(tl.uint32), kept, MASK, RADEMACHER, SIZE)
        acc = accumulate(acc, v, tl.load(coeffs_ptr + FIRST + k).to(WIDE))
    if POINTER == 2 and not DECAY:  # a step that is not taken changes not even the sign of a zero
        moved = tl.abs(alpha)
        for k in range(1, PROBES):
            moved += tl.abs(tl.load(coeffs_ptr + k).to(WIDE))
        acc = tl.where(moved == 0, x, acc)
    tl.store(out_ptr + index, quantize(acc, word, DTYPE, STOCHASTIC, FLIP), mask=inside)
    if PAIR:
        acc = accumulate(x, u, -alpha)
        tl.store(minus_ptr + index, quantize(acc, word, DTYPE, STOCHASTIC, not FLIP), mask=inside)


def fill_(out: Tensor, draw: Draw, alphas: tuple[float, ...] | Tensor) -> None:
    """out[i] ← Σₖ alphas[k]·u_k[i], rounded to nearest; out is flat."""
    _launch(out, None, None, draw, alphas, 1.0, False, False)


def add_noise_(
    out: Tensor,
    x: Tensor,
    draw: Draw,
    alphas: tuple[float, ...] | Tensor,
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
    stochastic = rounding == Rounding.STOCHASTIC and x.dtype.itemsize == 2
    _launch(out, minus, x, draw, alphas, decay, stochastic, flip)


def _launch(
    out: Tensor,
    minus: Tensor | None,
    x: Tensor | None,
    draw: Draw,
    alphas: tuple[float, ...] | Tensor,
    decay: float,
    stochastic: bool,
    flip: bool,
) -> None:
    key = draw.key
    threshold, mask_words, limit = mask_numbers(draw)
    n = out.numel()
    groups, warps = lanes(n)
    place, launches = Place.of(draw, n, groups)
    if isinstance(alphas, Tensor):
        pointer, coeffs, alpha = 2, alphas, 0.0
    else:
        pointer, alpha = int(len(alphas) > 1 or out.dtype == torch.float64), alphas[0]
        coeffs = fp64_on_device(out, decay, threshold, *alphas) if pointer else out
    clock = out if key.clock is None else key.clock
    with torch.cuda.device_of(out):
        for first, grid, whole in launches:
            _add_noise[grid](
                out, out if minus is None else minus, out if x is None else x, coeffs, clock,
                n, *place, first, alpha, decay, threshold, *key.words, *mask_words, limit,
                ALIGNED=place.shift == 0, WHOLE=whole, ROWS=draw.rows is not None, PROBES=len(alphas), POINTER=pointer,
                CLOCK=key.clock is not None, PAIR=minus is not None, LOAD=x is not None, DECAY=decay != 1.0,
                MASK=MASKS[type(draw.mask)], RADEMACHER=draw.distribution == Distribution.RADEMACHER,
                STOCHASTIC=stochastic, FLIP=flip, GROUPS=groups, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip


@triton.jit(do_not_specialize=["k0", "k1", "c2", "c3"])
def _add_noise_together(
    table_ptr, out_ptr, minus_ptr, coeffs_ptr, clock_ptr, alpha, decay, k0, k1, c2, c3,
    ROWS: tl.constexpr, ALIGNED: tl.constexpr, PROBES: tl.constexpr, POINTER: tl.constexpr, STILL: tl.constexpr,
    CLOCK: tl.constexpr, COPY: tl.constexpr, PAIR: tl.constexpr, DECAY: tl.constexpr, RADEMACHER: tl.constexpr,
    STOCHASTIC: tl.constexpr, FLIP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """``_add_noise`` on the tensors of a table, which holds the end of each one's tiles, and then their rows."""
    SIZE: tl.constexpr = GROUPS * 8
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    ends = tl.load(table_ptr + tl.arange(0, ROWS))
    row = table_ptr + ROWS + tl.sum((ends <= tl.program_id(0)).to(tl.int32), 0) * COLUMNS
    x_ptr = tl.load(row).to(tl.pointer_type(DTYPE))
    n, base, lead, shift = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    first, copy, factor = tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)
    factor = factor.to(tl.int32).to(tl.float32, bitcast=True)
    if ALIGNED:  # then lanes load and store 16 bytes at a time
        x_ptr = tl.multiple_of(x_ptr, 16)
        n = tl.multiple_of(n, 8)
    copy = tl.multiple_of(copy, 8)
    counter, index = stretch((tl.program_id(0) - first) * GROUPS, base, lead, shift, ALIGNED, GROUPS)
    low, high = counters(counter, GROUPS)
    inside = (index >= 0) & (index < n)
    x = tl.load(x_ptr + index, mask=inside, other=0).to(tl.float32)
    if POINTER:
        alpha = tl.load(coeffs_ptr)
    alpha = alpha * factor
    if CLOCK:
        c2 = tick(clock_ptr, c3)
    k0, k1, c2, c3 = k0.to(tl.uint32), k1.to(tl.uint32), c2.to(tl.uint32), c3.to(tl.uint32)
    acc = x
    if DECAY:
        acc = x * decay
    u, word = masked_noise(low, high, k0, k1, c2, c3, inside, 0, RADEMACHER, SIZE)
    acc = accumulate(acc, u, alpha)
    moved = tl.abs(alpha)
    for k in range(1, PROBES):
        v, _ = masked_noise(low, high, k0, k1, c2, (c3 + 16 * k).to(tl.uint32), inside, 0, RADEMACHER, SIZE)
        beta = tl.load(coeffs_ptr + k) * factor
        moved += tl.abs(beta)
        acc = accumulate(acc, v, beta)
    if STILL:  # a step that is not taken changes not even the sign of a zero
        acc = tl.where(moved == 0, x, acc)
    result = quantize(acc, word, DTYPE, STOCHASTIC, FLIP)
    if COPY:
        tl.store(out_ptr + copy + index, result, mask=inside)
    else:
        tl.store(x_ptr + index, result, mask=inside)
    if PAIR:
        acc = accumulate(x, u, -alpha)
        tl.store(minus_ptr + copy + index, quantize(acc, word, DTYPE, STOCHASTIC, not FLIP), mask=inside)


class Layout(NamedTuple):
    """The numbers that a launch over a table needs.

    Args:
        rows: rows of the table, a power of two.
        tiles: tiles of all tensors.
        groups: lanes of a program.
        warps: warps of a program.
        size: elements of a buffer for all copies.
        copies: the first element of each tensor's copy in that buffer.
    """

    rows: int
    tiles: int
    groups: int
    warps: int
    size: int
    copies: tuple[int, ...]


def laid_out(takers: Sequence[Taker]) -> tables.Table | None:
    """The table of tensors of one dtype on one device; None if it would have to be made in a capture."""
    first = takers[0].param
    groups, warps = lanes(sum(taker.param.numel() for taker in takers))
    numbers = tuple((taker.param.data_ptr(), taker.param.numel(), taker.draw.offset, taker.factor) for taker in takers)
    key = ("noise", first.device, first.dtype, groups, warps, numbers)

    def make() -> tables.Table:
        room, size, tiles = COPY_BYTES // first.itemsize, 0, 0
        ends, rows, copies = [], [], []
        for taker, (address, n, _, factor) in zip(takers, numbers, strict=True):
            place, launches = Place.of(taker.draw, n, groups)
            bits = int(np.float32(factor).view(np.int32))
            rows += [address, n, place.base, place.lead, place.shift, tiles, size, bits]
            copies.append(size)
            tiles += sum(launch.grid[0] for launch in launches)
            size += triton.cdiv(n, room) * room
            ends.append(tiles)
        count = max(LEAST_ROWS, triton.next_power_of_2(len(takers)))
        ends += [tiles] * (count - len(takers))
        layout = Layout(count, tiles, groups, warps, size, tuple(copies))
        return tables.Table(torch.tensor(ends + rows, dtype=torch.int64, device="cpu"), layout)

    return tables.table(key, first.device, make)


def add_noise_together_(
    takers: Sequence[Taker],
    table: tables.Table,
    alphas: tuple[float, ...] | Tensor,
    out: Tensor | None = None,
    minus: Tensor | None = None,
) -> None:
    """:func:`add_noise_` on the tensors of a table, with coefficients alphas·factor, in one launch.

    Args:
        takers: the tensors, which differ only in addresses, sizes, offsets and factors.
        table: their table.
        alphas: one per probe.
        out: a flat buffer for the copies; by default the tensors themselves change.
        minus: the same for the copies on the other side.
    """
    like, layout = takers[0], table.about
    param, draw, key = like.param, like.draw, like.draw.key
    read = isinstance(alphas, Tensor)
    if isinstance(alphas, Tensor):
        coeffs, alpha = alphas, 0.0
    elif len(alphas) > 1:
        numbers = torch.tensor(alphas, dtype=torch.float32, device="cpu")
        coeffs, alpha = numbers.to(param.device, non_blocking=True), 0.0
    else:
        coeffs, alpha = table.numbers, alphas[0]
    target = param if out is None else out
    with torch.cuda.device_of(param):
        _add_noise_together[(layout.tiles,)](
            table.numbers, target, target if minus is None else minus, coeffs,
            table.numbers if key.clock is None else key.clock, alpha, like.decay, *key.words,
            ROWS=layout.rows, ALIGNED=like.aligned, PROBES=len(alphas), POINTER=read or len(alphas) > 1,
            STILL=read and like.decay == 1.0, CLOCK=key.clock is not None, COPY=out is not None,
            PAIR=minus is not None, DECAY=like.decay != 1.0, RADEMACHER=draw.distribution == Distribution.RADEMACHER,
            STOCHASTIC=like.rounding == Rounding.STOCHASTIC and param.itemsize == 2, FLIP=like.flip,
            GROUPS=layout.groups, num_warps=layout.warps, enable_fp_fusion=False,
        )  # fmt: skip
