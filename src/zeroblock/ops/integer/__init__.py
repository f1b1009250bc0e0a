"""Matrices that are stored as integers with a scale per group: their numbers, and how these move.

    w = s·(q - z)                                  expand
    x wᵀ + b                                       linear
    w ± eps·u                                      perturb, perturb_pair
    q ← round(q + Σₖ alpha[k]·u_k / s)             add_noise_
    q ← round(q + delta / s)                       add_

All but the product read the bytes once and write the result: in a compiled loop on the CPU, in a kernel on a GPU
(``add_`` is plain torch there).
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from ...noise import Draw, Rounding, SmallMask
from ..shared.dispatch import Alpha, backend, is_triton
from . import reference
from .layout import Integers, packed, unpacked

__all__ = ["Integers", "add_", "add_noise_", "expand", "linear", "packed", "perturb", "perturb_pair", "unpacked"]

PIECE = 1 << 20
"""Numbers of a matrix that a product on the CPU expands at a time: 4 MiB in fp32, which stay in the cache."""


def expand(stored: Integers) -> Tensor:
    """(m, n) the matrix that the integers represent, in the dtype of the scales.

    >>> codes = packed(torch.tensor([[-7, 1, 0, 7]]), 4)
    >>> expand(Integers(codes, 4, torch.tensor([[0.5]])))
    tensor([[-3.5000,  0.5000,  0.0000,  3.5000]])
    """
    matrix: Tensor = _version(stored).expand(stored)
    return matrix


def linear(x: Tensor, stored: Integers, bias: Tensor | None = None) -> Tensor:
    """x wᵀ + b; (…, n) → (…, m).

    On the CPU some rows of w are expanded and multiplied at a time: memory for a large matrix comes fresh from the
    system in every call, and touching it takes longer than a product with few rows of x.
    """
    m, n = stored.shape
    rows = max(1, PIECE // n) if x.device.type == "cpu" else m
    if rows >= m:
        return F.linear(x, expand(stored), bias)
    parts = stored.split(rows)
    biases = [None] * len(parts) if bias is None else bias.split(rows)
    return torch.cat([F.linear(x, expand(part), b) for part, b in zip(parts, biases, strict=True)], -1)


def perturb(stored: Integers, draw: Draw, eps: float, *, rounding: Rounding = Rounding.STOCHASTIC) -> Tensor:
    """(m, n) w + eps·u, equal to ``ops.perturb`` of the expanded matrix to the bit."""
    copy: Tensor = _version(stored, draw).perturb(stored, draw, eps, rounding)
    return copy


def perturb_pair(
    stored: Integers, draw: Draw, eps: float, *, rounding: Rounding = Rounding.STOCHASTIC
) -> tuple[Tensor, Tensor]:
    """``perturb`` at +eps and at -eps, from one read of the integers and one draw of u."""
    plus, minus = _version(stored, draw).perturb_pair(stored, draw, eps, rounding)
    return plus, minus


def add_noise_(
    stored: Integers, draw: Draw, alpha: Alpha, *, decay: float = 1.0, rounding: Rounding = Rounding.STOCHASTIC
) -> None:
    """q ← round(q + Σₖ alpha[k]·u_k / s + (decay - 1)·(q - z)), clamped to the range of the integers.

    Args:
        stored: the matrix, whose codes are written.
        draw: the noise of the numbers.
        alpha: one coefficient, or one per probe; on a GPU also an fp32 tensor of them.
        decay: factor on the numbers.
        rounding: the rounding to integers, by bits of the ROUNDING stream.
    """
    version = _version(stored, draw)
    if is_triton(version) and stored.bits == 4 and not stored.by_lane(draw.offset):
        version = reference
    version.add_noise_(stored, draw, alpha, decay, rounding)


def add_(stored: Integers, delta: Tensor, start: int, draw: Draw, decay: float, rounding: Rounding) -> None:
    """q ← round(q + delta / s + (decay - 1)·(q - z)) for k integers from ``start`` on.

    Args:
        stored: the matrix, whose codes are written.
        delta: (k,) fp32.
        start: the first integer, in row-major order; with 4 bits, it and k are even.
        draw: its key's seed, step and probe, and its offset, address the rounding bits.
        decay: factor on the numbers.
        rounding: the rounding to integers.
    """
    version = _version(stored, draw)
    (reference if is_triton(version) else version).add_(stored, delta, start, draw, decay, rounding)


def _version(stored: Integers, draw: Draw | None = None) -> ModuleType:
    """The version that serves these tensors; the compiled ones read contiguous bytes and compute in fp32."""
    if stored.scales.dtype == torch.float64 or not stored.codes.is_contiguous():
        return reference
    version = backend("integer", stored.codes.device.type)
    plain = draw is None or (draw.rows is None and not isinstance(draw.mask, SmallMask))
    return version if plain or not is_triton(version) else reference
