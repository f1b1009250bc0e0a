"""The sizes of tensors, in whose units steps are given: root mean squares and quantiles."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .basis import CHUNK
from .shard import local, summed, whole

FLOOR = 0.25
"""Smallest size of a tensor for :class:`Relative`, in units of 1/√fan-in, the usual size of initial weights.
Qwen2.5-1.5B's matrices have 0.4 to 1.2 of these units, SmolLM2-135M's 1 to 10."""
SCALE_BITS = 8
"""Significant bits of a scale: so few that the order in which a device adds up squares does not matter."""


def root_mean_square(param: Tensor) -> float:
    """The root mean square of a tensor's elements, summed in double precision; 0 if there are none.

    >>> root_mean_square(torch.tensor([1.0, -7.0]))
    5.0
    """
    flat = param.detach().reshape(-1)
    squares = math.fsum(float(part.double().square().sum()) for part in flat.split(CHUNK))
    return math.sqrt(squares / max(1, flat.numel()))


def typical_size(
    param: Tensor, quantile: float | None = None, small: bool = False, least: float | None = None
) -> float:
    """The root mean square of a tensor's elements, or a quantile of their magnitudes; at least a quarter of 1/√fan-in.

    >>> typical_size(torch.tensor([1.0, -1.0, 2.0, 100.0])), typical_size(torch.tensor([1.0, -1.0, 2.0, 100.0]), 0.25)
    (50.0, 1.0)

    Args:
        param: the tensor.
        quantile: the quantile to take; None for the root mean square.
        small: whether the tensor is meant to be smaller than the floor, so that only a size of 0 gets it.
        least: a floor to use in place of the quarter, if a better one is known.
    """
    flat = param.detach().reshape(-1)
    if not flat.numel():
        return 1.0
    fan_in = flat.numel() // param.shape[0] if param.dim() > 1 else flat.numel()
    if quantile is None:
        size = root_mean_square(flat)
    else:
        size = float(flat.abs().kthvalue(max(1, round(quantile * flat.numel()))).values)
    floor = FLOOR / math.sqrt(fan_in) if least is None else least
    if not math.isfinite(size):
        return rounded(floor)
    return rounded(size if small and size else max(size, floor))


def rounded(scale: float) -> float:
    """A scale with SCALE_BITS significant bits.

    >>> rounded(1 / 3)
    0.333984375
    """
    mantissa, exponent = math.frexp(scale)
    return math.ldexp(round(math.ldexp(mantissa, SCALE_BITS)), exponent - SCALE_BITS)


def smallest(param: Tensor, k: int) -> float:
    """The k-th smallest magnitude of a tensor, exactly, by counting bit patterns in two rounds; 0 if there are none.

    Magnitudes sort like the integers of their bits, so this takes two histograms of
    at most 65,536 bins instead of a sort, whatever the tensor's size.  Processes that hold
    the shards of a tensor add up their histograms, and nothing else.
    """
    if not param.numel():
        return 0.0
    if param.dtype == torch.float64:
        return float(whole(param).reshape(-1).abs().kthvalue(k).values)
    flat = local(param).detach().reshape(-1)
    word, half = (torch.int32, 16) if flat.dtype == torch.float32 else (torch.int16, 0)
    high = torch.zeros(1 << 15, dtype=torch.int64, device=flat.device)
    mask = 0x7FFFFFFF if half else 0x7FFF
    for part in flat.split(CHUNK):
        high += torch.bincount((part.view(word) & mask).to(torch.int64) >> half, minlength=1 << 15)
    cumulative = summed(high, param).cumsum(0)
    top = int(torch.searchsorted(cumulative, k))
    if not half:
        return float(torch.tensor([top], dtype=torch.int16).view(flat.dtype).double())
    rest = k - (int(cumulative[top - 1]) if top else 0)
    low = torch.zeros(1 << 16, dtype=torch.int64, device=flat.device)
    for part in flat.split(CHUNK):
        pattern = part.view(word) & mask
        low += torch.bincount(pattern[pattern >> half == top].to(torch.int64) & 0xFFFF, minlength=1 << 16)
    bottom = int(torch.searchsorted(summed(low, param).cumsum(0), rest))
    return float(torch.tensor([top << 16 | bottom], dtype=torch.int32).view(torch.float32).double())
