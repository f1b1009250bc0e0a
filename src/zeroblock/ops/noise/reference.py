"""The slow, obvious version, in numpy; each line here is a line of ``docs/noise.md``."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ...noise import Draw, Rounding
from ..shared.reference import element_words, fma, keep, load, narrowed, probe


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
    minus ← round(x - alphas[0]·u) too, with the bits complemented.
    """
    if minus is not None:
        add_noise_(minus, x, draw, (-alphas[0],), decay=1.0, rounding=rounding, flip=not flip)
    value = load(x)
    wide = value.dtype.type
    kept = keep(value, draw)
    acc = value * wide(decay)
    for k, alpha in enumerate(alphas):
        u = probe(draw, k, kept)
        acc = acc + wide(alpha) * u.astype(wide) if wide is np.float64 else fma(u, alpha, acc)
    word = element_words(draw.key, draw, x.numel()) ^ np.uint32(0xFFFFFFFF if flip else 0)
    out.copy_(narrowed(acc, out.dtype, word if rounding == Rounding.STOCHASTIC else None))
