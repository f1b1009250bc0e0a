"""The basis of weights that are stored as integers: noise is added to their values, steps are rounded to the grid."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .. import ops
from ..errors import ZeroBlockError
from ..noise import Key, SmallMask
from ..quantise import Codes, QuantisedLinear, expanded
from .base import Alphas, Basis
from .elementwise import Elementwise
from .scaled import Scaled
from .wrapped import Wrapped

MIDDLE = 1536.0
"""Between 1,024 and 2,048 the numbers of fp16 are the integers, so that rounding to fp16 rounds to the grid."""


@dataclasses.dataclass(frozen=True)
class Grid(Wrapped):
    """P is the identity, on the values w = s·q of integers q.

        q ← round(q + alpha·δ / s)

    rounded up with a probability equal to the fraction, by the bits that round 16-bit weights: the mean of
    a step is kept, and it replays.  An integer at the end of its range stays there.

    Args:
        inner: the basis of the values.
        kind: of the integers.
        scales: (m, n / group).
        group: integers that share a scale.
    """

    inner: Elementwise
    kind: type[Codes]
    scales: Tensor
    group: int

    capturable = carries = pairs = True

    @classmethod
    def over(cls, basis: Basis, layer: QuantisedLinear) -> Basis:
        """The basis of a layer's integers, given that of its values."""
        if isinstance(basis, Scaled):
            return dataclasses.replace(basis, inner=cls.over(basis.inner, layer))
        if not isinstance(basis, Elementwise) or isinstance(basis.mask, SmallMask):
            raise ZeroBlockError(
                "integers move one by one, in the subspaces Full and Bernoulli; for low-rank or sparse steps of a "
                "quantised model train an adapter (--lora) or its scales (--weights int8:scales)"
            )
        return cls(basis, layer.kind, layer.scales, layer.group)

    def perturbed(self, param: Tensor, key: Key, eps: float) -> Tensor:
        return self.inner.perturbed(expanded(param, self.kind, self.scales), key, eps)

    def mirrored(self, param: Tensor, key: Key, eps: float) -> tuple[Tensor, Tensor]:
        return self.inner.mirrored(expanded(param, self.kind, self.scales), key, eps)

    def coords(self, param: Tensor, key: Key, span: slice) -> Tensor:
        z = torch.zeros(span.stop - span.start, dtype=torch.float32, device=param.device)
        return ops.add_noise_(z, self.inner.elementwise(key).at(span.start), 1.0)

    def add_(self, param: Tensor, key: Key, alphas: Alphas, decay: float) -> None:
        for span in self.spans():
            g = torch.zeros(span.stop - span.start, dtype=torch.float32, device=param.device)
            ops.add_noise_(g, self.inner.elementwise(key).at(span.start), alphas)
            self.lift_(param, g, span, 1.0, key, decay)

    def lift_(self, param: Tensor, delta: Tensor, span: slice, alpha: float, key: Key, decay: float) -> None:
        flat = param.detach().view(-1)[span.start // self.kind.per_byte : span.stop // self.kind.per_byte]
        integers = self.kind.unpacked(flat)
        groups = torch.arange(span.start, span.stop, device=param.device) // self.group
        change = delta * alpha / self.scales.detach().view(-1)[groups]
        if decay != 1.0:
            change += (decay - 1) * integers
        moved = (integers + MIDDLE).half()
        ops.add_(moved, change, 1.0, self.inner.elementwise(key).at(span.start), rounding=self.rounding)
        flat.copy_(self.kind.packed((moved - MIDDLE).clamp_(-self.kind.limit, self.kind.limit)))

    def transport(self, state: Tensor, old: Basis) -> Tensor:
        return state

    def clocked(self, clock: Tensor) -> Grid:
        return dataclasses.replace(self, inner=self.inner.clocked(clock))

    def memory(self) -> tuple[object, ...]:
        return (self.scales.data_ptr(), *self.inner.memory())
