"""The basis of weights that are stored as integers: noise is added to values, and steps are rounded to the grid."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .. import ops
from ..errors import ZeroBlockError
from ..noise import Key, SmallMask
from ..ops import integer
from ..quantise import Codes, QuantisedLinear
from .base import Alphas, Basis
from .elementwise import Elementwise
from .scaled import Scaled
from .wrapped import Wrapped


@dataclasses.dataclass(frozen=True)
class Grid(Wrapped):
    """P is the identity, on the values w = s·(q - z) of integers q.

        q ← round(q + alpha·δ / s)

    The result is rounded up with a probability equal to its fraction, by the bits that round 16-bit weights: the mean
    of a step is kept, and it replays.  An integer at the end of its range stays there.

    Args:
        inner: the basis of the values.
        kind: the class of the integers.
        scales: (m, n / group) scales s.
        group: the number of integers that share a scale.
        zeros: (m, n / group) int8 zero points z; None where all are 0.
    """

    inner: Elementwise
    kind: type[Codes]
    scales: Tensor
    group: int
    zeros: Tensor | None = None

    capturable = carries = pairs = True

    @classmethod
    def over(cls, basis: Basis, layer: QuantisedLinear) -> Basis:
        """The basis of a layer's integers, made from the basis of its values."""
        if isinstance(basis, Scaled):
            return dataclasses.replace(basis, inner=cls.over(basis.inner, layer))
        if not isinstance(basis, Elementwise) or isinstance(basis.mask, SmallMask):
            raise ZeroBlockError(
                "integers move one by one, in the subspaces Full and Bernoulli; for low-rank or sparse steps of a "
                "quantised model train an adapter (--lora) or its scales (--weights int8:scales)"
            )
        return cls(basis, layer.kind, layer.scales, layer.group, layer.zeros)

    def stored(self, param: Tensor) -> integer.Integers:
        """The integers as stored, with their scales and zero points."""
        return integer.Integers(param.detach(), self.kind.bits, self.scales, self.zeros)

    def copied_bytes(self, param: Tensor) -> int:
        return self.size * self.scales.itemsize

    def perturbed(self, param: Tensor, key: Key, eps: float) -> Tensor:
        return integer.perturb(self.stored(param), self.inner.elementwise(key), eps, rounding=self.rounding)

    def mirrored(self, param: Tensor, key: Key, eps: float) -> tuple[Tensor, Tensor]:
        return integer.perturb_pair(self.stored(param), self.inner.elementwise(key), eps, rounding=self.rounding)

    def coords(self, param: Tensor, key: Key, span: slice) -> Tensor:
        z = torch.zeros(span.stop - span.start, dtype=torch.float32, device=param.device)
        return ops.add_noise_(z, self.inner.elementwise(key).at(span.start), 1.0)

    def add_(self, param: Tensor, key: Key, alphas: Alphas, decay: float) -> None:
        draw = self.inner.elementwise(key)
        integer.add_noise_(self.stored(param), draw, alphas, decay=decay, rounding=self.rounding)

    def lift_(self, param: Tensor, delta: Tensor, span: slice, alpha: float, key: Key, decay: float) -> None:
        draw = self.inner.elementwise(key)
        integer.add_(self.stored(param), delta * alpha, span.start, draw, decay, self.rounding)

    def transport(self, state: Tensor, old: Basis) -> Tensor:
        return state

    def clocked(self, clock: Tensor) -> Grid:
        return dataclasses.replace(self, inner=self.inner.clocked(clock))

    def memory(self) -> tuple[object, ...]:
        zeros = None if self.zeros is None else self.zeros.data_ptr()
        return (self.scales.data_ptr(), zeros, *self.inner.memory())
