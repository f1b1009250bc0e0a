"""The slow, obvious version, in numpy."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ...noise import ROUNDING, Draw, Rounding
from ..shared.reference import element_words, fma, keep, load, narrowed, probe


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
    taken, rate, c1, c2, *shares = np.array(scalars, dtype=np.float32)
    if taken == 0:
        return
    beta1, rest1, beta2, rest2, eps = np.array(constants, dtype=np.float32)
    value, n = load(x), x.numel()
    kept = keep(value, draw)
    g = shares[0] * probe(draw, 0, kept)
    for k in range(1, len(shares)):
        g = fma(probe(draw, k, kept), shares[k], g)
    first = fma(load(m), beta1, rest1 * g)
    second = fma(load(v), beta2, rest2 * (g * g))
    d = (first * c1) / (np.sqrt(second * c2) + eps)
    acc = fma(d, rate, value * np.float32(decay))
    word = element_words(draw.key, draw, n)
    x.copy_(narrowed(acc, x.dtype, word if rounding == Rounding.STOCHASTIC else None))
    word = element_words(draw.key.to(stream=ROUNDING), draw, n)
    m.copy_(narrowed(first, m.dtype, word))
    v.copy_(narrowed(second, v.dtype, word >> np.uint32(16)))
