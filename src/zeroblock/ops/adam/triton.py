"""The GPU kernel (Triton), equal to ``reference.py`` to the bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...noise import ROUNDING, Distribution, Draw, Rounding
from ..shared.triton import (
    MASKS,
    NUMBERS,
    WARPS,
    Place,
    accumulate,
    element_words,
    kept_elements,
    mask_numbers,
    masked_noise,
    quantize,
    tick,
    tile,
)

GROUPS = 128  # lanes of a program: three tensors and two draws fill the registers


@triton.jit(do_not_specialize=[*NUMBERS, "r3", "m2", "m3", "limit"])
def _adam(
    x_ptr, m_ptr, v_ptr, scalars_ptr, clock_ptr, n, base, lead, shift, width, stride, first,
    beta1, rest1, beta2, rest2, eps, decay, threshold, k0, k1, c2, c3, r3, m2, m3, limit,
    ALIGNED: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, PROBES: tl.constexpr, CLOCK: tl.constexpr,
    DECAY: tl.constexpr, MASK: tl.constexpr, RADEMACHER: tl.constexpr, STOCHASTIC: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    if tl.load(scalars_ptr) == 0:
        return
    SIZE: tl.constexpr = GROUPS * 8
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    MOMENT: tl.constexpr = m_ptr.dtype.element_ty
    low, high, index, inside = tile(n, base, lead, shift, width, stride, first, ALIGNED, WHOLE, ROWS, GROUPS)
    x = tl.load(x_ptr + index, mask=inside, other=0).to(tl.float32)
    m = tl.load(m_ptr + index, mask=inside, other=0).to(tl.float32)
    v = tl.load(v_ptr + index, mask=inside, other=0).to(tl.float32)
    if CLOCK:
        c2 = tick(clock_ptr, c3)
        m2 = tick(clock_ptr, m3)
    k0, k1, c2, c3 = k0.to(tl.uint32), k1.to(tl.uint32), c2.to(tl.uint32), c3.to(tl.uint32)
    kept = kept_elements(x, inside, threshold, low, high, k0, k1, m2, m3, limit, MASK, SIZE)
    u, word = masked_noise(low, high, k0, k1, c2, c3, kept, MASK, RADEMACHER, SIZE)
    g = u * tl.load(scalars_ptr + 4)
    for k in range(1, PROBES):
        u, _ = masked_noise(low, high, k0, k1, c2, (c3 + 16 * k).to(tl.uint32), kept, MASK, RADEMACHER, SIZE)
        g = accumulate(g, u, tl.load(scalars_ptr + 4 + k))
    m = accumulate(g * rest1, m, beta1)
    v = accumulate((g * g) * rest2, v, beta2)
    root = tl.sqrt_rn(v * tl.load(scalars_ptr + 3)) + eps
    d = tl.div_rn(m * tl.load(scalars_ptr + 2), root)
    if DECAY:
        x = x * decay
    x = accumulate(x, d, tl.load(scalars_ptr + 1))
    tl.store(x_ptr + index, quantize(x, word, DTYPE, STOCHASTIC, False), mask=inside)
    NARROW: tl.constexpr = MOMENT == tl.bfloat16
    if NARROW:
        word = element_words(low, high, k0, k1, c2, r3.to(tl.uint32), SIZE)
    tl.store(m_ptr + index, quantize(m, word, MOMENT, NARROW, False), mask=inside)
    tl.store(v_ptr + index, quantize(v, word >> 16, MOMENT, NARROW, False), mask=inside)


def adam_(
    x: Tensor,
    m: Tensor,
    v: Tensor,
    draw: Draw,
    scalars: tuple[float, ...] | Tensor,
    constants: tuple[float, ...],
    *,
    decay: float,
    rounding: Rounding,
) -> None:
    """Adam's update of flat x, m and v: (taken, -lr, c1, c2, shares), (β1, 1 - β1, β2, 1 - β2, eps) in fp32."""
    key = draw.key
    threshold, mask_words, limit = mask_numbers(draw)
    n = x.numel()
    place, launches = Place.of(draw, n, GROUPS)
    if not isinstance(scalars, Tensor):
        scalars = torch.tensor(scalars, dtype=torch.float32).to(x.device, non_blocking=True)
    clock = x if key.clock is None else key.clock
    with torch.cuda.device_of(x):
        for first, grid, whole in launches:
            _adam[grid](
                x, m, v, scalars, clock, n, *place, first, *constants, decay, threshold, *key.words,
                key.to(stream=ROUNDING).words[3], *mask_words, limit,
                ALIGNED=place.shift == 0, WHOLE=whole, ROWS=draw.rows is not None, PROBES=len(scalars) - 4,
                CLOCK=key.clock is not None, DECAY=decay != 1.0, MASK=MASKS[type(draw.mask)],
                RADEMACHER=draw.distribution == Distribution.RADEMACHER,
                STOCHASTIC=rounding == Rounding.STOCHASTIC and x.dtype.itemsize == 2,
                GROUPS=GROUPS, num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
