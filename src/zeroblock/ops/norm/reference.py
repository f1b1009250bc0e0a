"""Plain torch, as the models write it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from . import Scaling


def rms_norm(x: Tensor, weight: Tensor, eps: float, scaling: Scaling) -> Tensor:
    """Normalise the last dimension.

    Args:
        x: (…, n).
        weight: (n,).
        eps: added to the mean of squares.
        scaling: how the normalised values are multiplied by the weights.

    Returns:
        (…, n) in the dtype of x.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if scaling is Scaling.ROUNDED:
        return weight * wide.to(x.dtype)
    factor = weight.float() + 1.0 if scaling is Scaling.SHIFTED else weight.float()
    return (wide * factor).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension to mean 0 and variance 1, then scale and shift: (…, n), (n,), (n,) → (…, n)."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)
