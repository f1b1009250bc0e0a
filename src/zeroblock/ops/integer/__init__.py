"""Matrices that are stored as integers with a scale per group: what they stand for, and how they move.

    w = s·(q - z)                                  expand
    w ± eps·u                                      perturb, perturb_pair
    q ← round(q + Σₖ alpha[k]·u_k / s)             add_noise_
    q ← round(q + delta / s)                       add_

On a GPU the first three are one kernel each, which reads the bytes once and writes the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...noise import Draw, Rounding, SmallMask
from ..shared.dispatch import Alpha
from . import reference
from .layout import Integers, packed, unpacked
from .reference import add_

__all__ = ["Integers", "add_", "add_noise_", "expand", "packed", "perturb", "perturb_pair", "unpacked"]


def expand(stored: Integers) -> Tensor:
    """(m, n) the matrix that integers stand for, in the dtype of the scales.

    >>> codes = packed(torch.tensor([[-7, 1, 0, 7]]), 4)
    >>> expand(Integers(codes, 4, torch.tensor([[0.5]])))
    tensor([[-3.5000,  0.5000,  0.0000,  3.5000]])
    """
    if not _on_gpu(stored):
        return reference.expand(stored)
    from .triton import expand as fused

    return fused(stored)


def perturb(stored: Integers, draw: Draw, eps: float, *, rounding: Rounding = Rounding.STOCHASTIC) -> Tensor:
    """(m, n) w + eps·u, as ``ops.perturb`` of the expanded matrix would be, to the bit."""
    if not _fused(stored, draw):
        return reference.perturb(stored, draw, eps, rounding)
    from .triton import perturb as fused

    return fused(stored, draw, eps, rounding)


def perturb_pair(
    stored: Integers, draw: Draw, eps: float, *, rounding: Rounding = Rounding.STOCHASTIC
) -> tuple[Tensor, Tensor]:
    """``perturb`` at +eps and at -eps, from one read of the integers and one draw of u."""
    if not _fused(stored, draw):
        return reference.perturb_pair(stored, draw, eps, rounding)
    from .triton import perturb_pair as fused

    return fused(stored, draw, eps, rounding)


def add_noise_(
    stored: Integers, draw: Draw, alpha: Alpha, *, decay: float = 1.0, rounding: Rounding = Rounding.STOCHASTIC
) -> None:
    """q ← round(q + Σₖ alpha[k]·u_k / s + (decay - 1)·(q - z)), clamped to the range of the integers.

    Args:
        stored: its codes are written.
        draw: the noise of the numbers.
        alpha: one coefficient, or one per probe; on a GPU also an fp32 tensor of them.
        decay: factor on the numbers.
        rounding: to the integers; its bits are those of the ROUNDING stream.
    """
    if not (_fused(stored, draw) and (stored.bits == 8 or stored.by_lane(draw.offset))):
        reference.add_noise_(stored, draw, alpha, decay, rounding)
        return
    from .triton import add_noise_ as fused

    fused(stored, draw, alpha, decay, rounding)


def _on_gpu(stored: Integers) -> bool:
    """Whether a kernel reads these tensors; it computes in fp32."""
    return stored.codes.is_cuda and stored.scales.dtype != torch.float64 and stored.codes.is_contiguous()


def _fused(stored: Integers, draw: Draw) -> bool:
    return _on_gpu(stored) and draw.rows is None and not isinstance(draw.mask, SmallMask)
