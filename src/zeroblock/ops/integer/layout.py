"""The layout of integers in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Integers(NamedTuple):
    """The tensors of a matrix (m, n) that is stored as integers: w = s·(q - z).

    Args:
        codes: (m, n) bytes, or (m, n / 2) with two integers in each, of any dtype of one byte.
        bits: bits of an integer, 8 or 4.
        scales: (m, groups) s of every group of a row; n is a multiple of the number of groups.
        zeros: (m, groups) z in int8; None if all are 0.
    """

    codes: Tensor
    bits: int
    scales: Tensor
    zeros: Tensor | None = None

    @property
    def per_byte(self) -> int:
        """Integers in a byte."""
        return 8 // self.bits

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n)."""
        return self.codes.shape[0], self.codes.shape[1] * self.per_byte

    @property
    def group(self) -> int:
        """Integers that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest and the largest integer; without zero points one is the negative of the other."""
        largest = (1 << self.bits - 1) - 1
        return -largest if self.zeros is None else -largest - 1, largest

    def split(self, rows: int) -> list[Integers]:
        """The matrix in parts of ``rows`` rows each.

        >>> [part.shape for part in Integers(torch.zeros(5, 4, dtype=torch.uint8), 4, torch.ones(5, 1)).split(2)]
        [(2, 8), (2, 8), (1, 8)]
        """
        codes, scales = self.codes.split(rows), self.scales.split(rows)
        zeros = [None] * len(codes) if self.zeros is None else self.zeros.split(rows)
        return [Integers(c, self.bits, s, z) for c, s, z in zip(codes, scales, zeros, strict=True)]

    def by_lane(self, offset: int) -> bool:
        """Whether the eight elements of every lane of noise are one 32-bit word of 4-bit integers.

        Args:
            offset: the offset of the noise.
        """
        whole = self.codes.numel() * self.per_byte % 8 == 0 and self.codes.data_ptr() % 4 == 0
        return whole and offset % 8 == 0


def packed(integers: Tensor, bits: int) -> Tensor:
    """(…, n) integers → (…, n) or (…, n / 2) uint8; two in a byte are stored plus 8, the first in the lower half.

    >>> packed(torch.tensor([-7, 1, 0, 7]), 4)
    tensor([145, 248], dtype=torch.uint8)
    """
    if bits == 8:
        return integers.to(torch.int8).contiguous().view(torch.uint8)
    shifted = (integers + 8).to(torch.uint8)
    return (shifted[..., 0::2] | shifted[..., 1::2] << 4).contiguous()


def unpacked(codes: Tensor, bits: int) -> Tensor:
    """The integers of :func:`packed` bytes, in int8."""
    if bits == 8:
        return codes.detach().view(torch.int8)
    both = codes.detach().view(torch.uint8)
    return torch.stack([both & 15, both >> 4], dim=-1).flatten(-2).to(torch.int8) - 8
