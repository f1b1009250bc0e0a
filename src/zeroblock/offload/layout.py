"""The layout of a layer's tensors in one flat buffer, so that the layer moves in one copy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

ALIGN_BYTES = 512
"""Tensors begin at multiples of this, as in memory that torch allocates: kernels choose by alignment."""
PAGE_BYTES = 4096
"""Layers begin at multiples of this, so that no page belongs to two of them."""

CONVERTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of weights that may be converted to each other; integers in other dtypes may not."""

Span = tuple[int, int]
"""The first byte, and the one after the last."""


class Slot(NamedTuple):
    """The place of a tensor in a buffer."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


class Layout:
    """The places of some tensors, one after another.

    Args:
        tensors: tensors of any dtypes; one that does not fill its memory becomes contiguous.
        dtype: the dtype that parameters are converted to; by default they stay as they are.
    """

    def __init__(self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> None:
        self.slots: list[Slot] = []
        at = 0
        for tensor in tensors:
            stride = tensor.stride() if _dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
            converts = isinstance(tensor, nn.Parameter) and tensor.dtype in CONVERTED  # tables of angles stay fp32
            kind = dtype if dtype is not None and converts else tensor.dtype
            nbytes = tensor.numel() * kind.itemsize
            self.slots.append(Slot(at, nbytes, kind, tensor.shape, stride))
            at += _rounded(nbytes, ALIGN_BYTES)
        self.nbytes = _rounded(at, PAGE_BYTES)
        """Bytes of all tensors."""

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors in a buffer.

        Args:
            flat: (at least nbytes,) uint8.
        """
        views = []
        for start, nbytes, dtype, shape, stride in self.slots:
            part = flat[start : start + nbytes].view(dtype)
            views.append(part.as_strided(shape, stride, part.storage_offset()))
        return views

    def spans(self, wanted: Collection[int]) -> list[Span]:
        """The bytes of some of the tensors, with neighbours joined."""
        spans: list[Span] = []
        for i, slot in enumerate(self.slots):
            if i not in wanted or not slot.nbytes:
                continue
            if spans and (i - 1) in wanted:
                spans[-1] = (spans[-1][0], slot.start + slot.nbytes)
            else:
                spans.append((slot.start, slot.start + slot.nbytes))
        return spans


def _dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory, in whatever order."""
    if not tensor.numel():
        return False
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return extent == tensor.numel()


def _rounded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
