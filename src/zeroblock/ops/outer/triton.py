"""The GPU kernel (Triton), equal to ``reference.py`` to the bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...noise import ROUNDING, Draw, Rounding
from ..shared.triton import NUMBERS, Place, accumulate, element_words, fp64_on_device, lanes, quantize, tile


@triton.jit(do_not_specialize=NUMBERS)
def _add(
    x_ptr, delta_ptr, v_ptr, coeffs_ptr, clock_ptr, n, base, lead, shift, width, stride, first, alpha, decay,
    k0, k1, c2, c3, columns,
    ALIGNED: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, CLOCK: tl.constexpr,
    DECAY: tl.constexpr, STOCHASTIC: tl.constexpr, FLIP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = GROUPS * 8
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    low, high, index, inside = tile(n, base, lead, shift, width, stride, first, ALIGNED, WHOLE, ROWS, GROUPS)
    acc = tl.load(x_ptr + index, mask=inside, other=0).to(WIDE)
    if tl.float64 == WIDE:
        decay = tl.load(coeffs_ptr)
        alpha = tl.load(coeffs_ptr + 1)
    if DECAY:
        acc = acc * decay
    if RANK == 0:
        delta = tl.load(delta_ptr + index, mask=inside, other=0)
    else:  # row i, column j of z Vᵀ, the products summed in order, each rounded
        row = tl.maximum(tl.min(index, 0), 0) // columns  # one long division per tile, short ones per lane
        local = (index - row * columns).to(tl.int32)
        i = row + local // columns
        j = local % columns
        delta = tl.load(delta_ptr + i * RANK, mask=inside, other=0) * tl.load(v_ptr + j, mask=inside, other=0)
        for k in tl.static_range(1, RANK):
            z = tl.load(delta_ptr + i * RANK + k, mask=inside, other=0)
            delta = delta + z * tl.load(v_ptr + k * columns + j, mask=inside, other=0)
    acc = accumulate(acc, delta, alpha)
    word = tl.zeros([SIZE], tl.uint32)
    if STOCHASTIC:
        if CLOCK:
            c2 = tl.load(clock_ptr)
        word = element_words(low, high, k0.to(tl.uint32), k1.to(tl.uint32), c2.to(tl.uint32), c3.to(tl.uint32), SIZE)
    tl.store(x_ptr + index, quantize(acc, word, DTYPE, STOCHASTIC, FLIP), mask=inside)


def add_(
    x: Tensor, delta: Tensor, alpha: float, draw: Draw, *, decay: float, rounding: Rounding, flip: bool = False
) -> None:
    """x ← round(decay·x + alpha·delta); flat tensors, delta fp32."""
    _launch(x, delta, delta, 0, 1, alpha, draw, decay, rounding, flip)


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
    """x ← round(decay·x + alpha·z Vᵀ); x flat, z (m, r) and v (n, r) fp32, z contiguous."""
    _launch(x, z, v.T.contiguous(), z.shape[1], v.shape[0], alpha, draw, decay, rounding, flip)


def _launch(
    x: Tensor,
    delta: Tensor,
    v: Tensor,
    rank: int,
    columns: int,
    alpha: float,
    draw: Draw,
    decay: float,
    rounding: Rounding,
    flip: bool,
) -> None:
    key = draw.key.to(stream=ROUNDING)
    n = x.numel()
    groups, warps = lanes(n)
    place, launches = Place.of(draw, n, groups)
    coeffs = fp64_on_device(x, decay, alpha) if x.dtype == torch.float64 else x
    clock = x if key.clock is None else key.clock
    with torch.cuda.device_of(x):
        for first, grid, whole in launches:
            _add[grid](
                x, delta, v, coeffs, clock, n, *place, first, alpha, decay, *key.words, columns,
                ALIGNED=place.shift == 0, WHOLE=whole, ROWS=draw.rows is not None, RANK=rank,
                CLOCK=key.clock is not None, DECAY=decay != 1.0,
                STOCHASTIC=rounding == Rounding.STOCHASTIC and x.dtype.itemsize == 2,
                FLIP=flip, GROUPS=groups, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip
