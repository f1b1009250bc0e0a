"""A basis whose points lie around weights other than the tensor's own."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from ..noise import Key
from .base import Basis
from .wrapped import Wrapped


@dataclasses.dataclass(frozen=True)
class Elsewhere(Wrapped):
    """The directions of a basis, from an origin that is not the tensor: θ̃ + εPz.

    It is for measuring only; a step moves the tensor by the inner basis.

    Args:
        inner: the basis of the directions.
        origin: θ̃, of the tensor's shape and dtype; the next anchor may be written into it.
    """

    inner: Basis
    origin: Tensor = dataclasses.field(compare=False)

    behind = True  # the tensor itself is not the point at distance 0

    @property
    def pairs(self) -> bool:
        return self.inner.pairs

    def coords(self, param: Tensor, key: Key, span: slice) -> Tensor:
        return self.inner.coords(self.origin, key, span)

    def lift_(self, param: Tensor, delta: Tensor, span: slice, alpha: float, key: Key, decay: float) -> None:
        raise TypeError("an anchor is never moved")

    def perturbed(self, param: Tensor, key: Key, eps: float) -> Tensor:
        return self.inner.perturbed(self.origin, key, eps)

    def mirrored(self, param: Tensor, key: Key, eps: float) -> tuple[Tensor, Tensor]:
        return self.inner.mirrored(self.origin, key, eps)
