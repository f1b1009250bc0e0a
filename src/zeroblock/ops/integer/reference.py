"""Plain torch, for any device: the integers are expanded first, and the operations on numbers do the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from ...noise import Draw, Rounding
from .. import noise, outer
from ..shared.dispatch import Alpha
from .layout import Integers, packed, unpacked

CHUNK = 1 << 22
"""Integers that are expanded at a time while they move: 16 MiB in fp32."""
MIDDLE = 1536.0
"""Between 1,024 and 2,048 the numbers of fp16 are the integers, so that rounding to fp16 rounds to the grid."""


def expand(stored: Integers) -> Tensor:
    """(m, n) s·(q - z), in the dtype of the scales."""
    groups = unpacked(stored.codes, stored.bits).unflatten(1, (stored.scales.shape[1], -1))
    if stored.zeros is not None:
        groups = groups.short() - stored.zeros[..., None]
    return torch.mul(groups, stored.scales.detach()[..., None]).flatten(1)


def perturb(stored: Integers, draw: Draw, eps: float, rounding: Rounding) -> Tensor:
    """(m, n) w + eps·u."""
    return noise.perturb(expand(stored), draw, eps, rounding=rounding)


def perturb_pair(stored: Integers, draw: Draw, eps: float, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """(m, n) w + eps·u and w - eps·u."""
    return noise.perturb_pair(expand(stored), draw, eps, rounding=rounding)


def add_noise_(stored: Integers, draw: Draw, alpha: Alpha, decay: float, rounding: Rounding) -> None:
    """q ← round(q + Σₖ alpha[k]·u_k / s + (decay - 1)·(q - z)), by bits of the ROUNDING stream."""
    total = stored.codes.numel() * stored.per_byte
    for start in range(0, total, CHUNK):
        g = torch.zeros(min(CHUNK, total - start), dtype=torch.float32, device=stored.codes.device)
        noise.add_noise_(g, draw.at(start), alpha)
        add_(stored, g, start, draw, decay, rounding)


def add_(stored: Integers, delta: Tensor, start: int, draw: Draw, decay: float, rounding: Rounding) -> None:
    """q ← round(q + delta / s + (decay - 1)·(q - z)) for the len(delta) integers from ``start`` on."""
    flat = stored.codes.detach().view(-1)[start // stored.per_byte : (start + len(delta)) // stored.per_byte]
    integers = unpacked(flat, stored.bits)
    groups = torch.arange(start, start + len(delta), device=delta.device) // stored.group
    change = delta / stored.scales.detach().view(-1)[groups]
    if decay != 1.0:
        change += (decay - 1) * (integers if stored.zeros is None else integers.short() - stored.zeros.view(-1)[groups])
    moved = (integers + MIDDLE).half()
    outer.add_(moved, change, 1.0, draw.at(start), rounding=rounding)
    flat.view(torch.uint8).copy_(packed((moved - MIDDLE).clamp_(*stored.limits), stored.bits))
