"""The basis of directions that a rule's state shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from .. import ops
from ..errors import ZeroBlockError
from ..noise import Key
from .base import CHUNK, Basis
from .wrapped import Wrapped

LEAST, LEAST_ON_GPU = 1 << 12, 1 << 24
"""The least number of coordinates to shape at once.  On a GPU they take 64 MiB in fp32, and so does the state that
shapes them: a point of OPT-13B has 1,300 pieces of six launches each, which take the host less time than the device."""


@dataclasses.dataclass(frozen=True)
class Shaped(Wrapped):
    """Another basis, with coordinates that are a function of the noise: z ↦ shape(z), element by element.

    The coordinates are materialised in fp32 before they are lifted, on the CPU at most a sixteenth of a large tensor at
    a time, on a GPU 16 million coordinates; the size of the pieces changes no bit.

    Args:
        inner: the other basis.
        shape: turns the noise on a span, (span,) in fp32, into z there; it may overwrite the noise.
    """

    inner: Basis
    shape: Callable[[Tensor, slice], Tensor]

    def __post_init__(self) -> None:
        if self.inner.behind:
            raise ZeroBlockError("a rule that shapes its directions needs the weights of every step: leave fold out")

    @property
    def carries(self) -> bool:
        return self.inner.carries

    def coords(self, param: Tensor, key: Key, span: slice) -> Tensor:
        return self.shape(self.inner.coords(param, key, span), span)

    def lift_(self, param: Tensor, delta: Tensor, span: slice, alpha: float, key: Key, decay: float) -> None:
        self.inner.lift_(param, delta, span, alpha, key, decay)

    def transport(self, state: Tensor, old: Basis) -> Tensor:
        return self.inner.transport(state, old)

    def perturbed(self, param: Tensor, key: Key, eps: float) -> Tensor:
        draw = self.inner.elementwise(key.to(probe=key.probe + 1))  # not the rounding bits of the update
        if draw is None:
            return super().perturbed(param, key, eps)
        copy = param.detach().clone(memory_format=torch.contiguous_format)
        piece = max(LEAST_ON_GPU if copy.is_cuda else LEAST, min(CHUNK, self.size // 16))
        for start in range(0, self.size, piece):
            span = slice(start, min(start + piece, self.size))
            part, z = copy.view(-1)[span], self.coords(param, key, span)
            # rounding mirrors with the sign of eps; otherwise second differences would measure the rounding
            ops.add_(part, z, eps * self.inner.scale, draw.at(start), rounding=self.rounding, flip=eps < 0)
        return copy
