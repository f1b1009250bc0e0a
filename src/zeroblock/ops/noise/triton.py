"""The GPU kernel (Triton), equal to ``reference.py`` to the bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...noise import Distribution, Draw, Rounding
from ..shared.triton import (
    MASKS,
    NUMBERS,
    Place,
    accumulate,
    fp64_on_device,
    kept_elements,
    lanes,
    mask_numbers,
    masked_noise,
    quantize,
    tick,
    tile,
)


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
