"""A checksum of weights: 64 bits that change with any bit of them, and are the same on every device."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

PIECE_WORDS = 1 << 20
"""Words of 8 bytes that are summed at a time: 8 MiB of products."""
MULTIPLIER = -7046029254386353131
"""2⁶⁴ divided by the golden ratio, as a signed number; odd, so a product with it loses no bit."""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensors: Iterable[Tensor]) -> int:
    """Σ wordᵢ·oddᵢ mod 2⁶⁴ over the bits of some tensors, in their order.

    A word is 8 bytes, and every place has an odd factor of its own: one changed bit changes the sum, and so do
    changes that cancel in a plain sum, like two weights rounded in opposite directions.  Shards of tensors are left
    out: no other rank holds them.

    >>> checksum([torch.zeros(3)]) == checksum([torch.tensor([0.0, 0.0, 1e-45])])
    False
    """
    total, places = 0, 0
    for tensor in tensors:
        if getattr(tensor, "placements", None) is not None:
            continue
        for words in _words(tensor.detach()):
            factors = _factors(words.device)[: len(words)]
            total += int((words * factors).sum()) * (2 * places + 1)
            places += 1
    return total % (1 << 64)


def _words(tensor: Tensor) -> Iterable[Tensor]:
    """The bits of a tensor as int64, in pieces; the last few elements are a piece of their own."""
    flat = tensor.contiguous().view(-1)
    if flat.data_ptr() % 8:
        flat = flat.clone()
    whole = flat.nbytes // 8 * 8 // flat.element_size()
    yield from flat[:whole].view(torch.int64).split(PIECE_WORDS)
    if whole < flat.numel():
        yield flat[whole:].view(WORDS[flat.element_size()]).to(torch.int64)


@functools.lru_cache(maxsize=8)
def _factors(device: torch.device) -> Tensor:
    """(PIECE_WORDS,) an odd factor per place."""
    return torch.arange(PIECE_WORDS, dtype=torch.int64, device=device) * 2 * MULTIPLIER + 1
