"""One of the tensors that share a launch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...noise import Draw, Rounding


class Taker(NamedTuple):
    """A tensor that takes noise.

    Args:
        param: the weights.
        draw: their noise.
        rounding: the rounding of 16-bit weights.
        factor: factor on its coefficients, in fp32.
        decay: factor on the weights.
        flip: whether the rounding bits are complemented.
    """

    param: Tensor
    draw: Draw
    rounding: Rounding
    factor: float = 1.0
    decay: float = 1.0
    flip: bool = False

    @property
    def aligned(self) -> bool:
        """Whether the eight elements of every lane lie in the tensor, from a multiple of 16 bytes."""
        return not (self.draw.offset % 8 or self.param.numel() % 8 or self.param.data_ptr() % 16)
