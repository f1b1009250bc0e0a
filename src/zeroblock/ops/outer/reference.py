"""The slow, obvious version, in numpy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...noise import ROUNDING, Draw, Rounding
from ..shared.reference import element_words, fma, load, narrowed


def add_(
    x: Tensor, delta: Tensor, alpha: float, draw: Draw, *, decay: float, rounding: Rounding, flip: bool = False
) -> None:
    """x ← round(decay·x + alpha·delta); flat tensors, delta fp32."""
    value = load(x)
    wide = value.dtype.type
    d = delta.detach().cpu().numpy()
    acc = value * wide(decay)
    acc = acc + wide(alpha) * d.astype(wide) if wide is np.float64 else fma(d, alpha, acc)
    word = element_words(draw.key.to(stream=ROUNDING), draw, x.numel()) ^ np.uint32(0xFFFFFFFF if flip else 0)
    x.copy_(narrowed(acc, x.dtype, word if rounding == Rounding.STOCHASTIC else None))


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
    """x ← round(decay·x + alpha·z Vᵀ); x flat, z (m, r) and v (n, r) fp32."""
    add_(x, product(z, v).view(-1), alpha, draw, decay=decay, rounding=rounding, flip=flip)


def product(z: Tensor, v: Tensor) -> Tensor:
    """z Vᵀ by r explicit products, so that the sum's order does not depend on a library; (m, n) fp32."""
    out = torch.outer(z[:, 0], v[:, 0])
    for k in range(1, z.shape[1]):
        out += torch.outer(z[:, k], v[:, k])
    return out
