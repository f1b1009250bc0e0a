"""The basis of directions that are products of two thin matrices, both drawn for each probe."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .. import ops
from ..noise import Draw, Key, Rounding
from .base import Alphas, Basis, Site
from .elementwise import Elementwise

RIGHT = 1 << 27
"""Offset of the probe number in the address of a probe's second factor; no step has this many probes."""


@dataclasses.dataclass(frozen=True)
class OuterProduct(Basis):
    """z = A Bᵀ/√r with A of m×r and B of n×r drawn for every probe; m×n is the tensor as a matrix.

    z is not linear in the numbers that are drawn, so coordinates are the elements of the tensor, as in a dense basis,
    and a rule's state has the tensor's size.  Measurements and SGD never materialise z.

    Args:
        shape: m and n.
        rank: r.
        site: the tensor's place among the weights.
        key: the address of the probe whose B ``factor`` returns; see :meth:`probed`.
    """

    shape: tuple[int, int]
    rank: int
    site: Site
    key: Key | None = None

    capturable = carries = True

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def rounding(self) -> Rounding:
        return self.site.rounding

    @property
    def factor_shape(self) -> tuple[int, int]:
        return self.shape[1], self.rank

    @property
    def dense(self) -> Elementwise:
        """The dense basis, which has the same coordinates."""
        return Elementwise(self.size, self.site)

    def spans(self) -> Iterator[slice]:
        return self.dense.spans()

    def probed(self, key: Key) -> OuterProduct:
        return dataclasses.replace(self, key=key)

    def factor(self, device: torch.device, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        """scale·B/√r of the probe, (n, r)."""
        assert self.key is not None
        out = torch.empty((self.shape[1], self.rank), dtype=dtype, device=device)
        return ops.fill_(out, self._draw(self.key.to(probe=self.key.probe + RIGHT)), scale / math.sqrt(self.rank))

    def coordinates_(self, out: Tensor, key: Key, scale: float, share: float = 1.0) -> Tensor:
        """out ← share·scale·A, (m, r) of any dtype."""
        return ops.fill_(out, self._draw(key), share * scale)

    def perturbed(self, param: Tensor, key: Key, eps: float) -> Tensor:
        copy = param.detach().clone(memory_format=torch.contiguous_format)
        bits = key.to(probe=key.probe + 1)  # not the update's rounding bits, which are those of probe 0
        a, b = self._left(key, eps, param.device), self.probed(key).factor(param.device)
        return ops.add_outer_(copy, a, b, 1.0, self._draw(bits), rounding=self.rounding, flip=eps < 0)

    def add_(self, param: Tensor, key: Key, alphas: Alphas, decay: float) -> None:
        """Add the products of all probes as one product, of rank r times the number of probes."""
        waits = not isinstance(alphas, Tensor)
        if decay == 1.0 and waits and not any(alphas):
            return
        keys = [key.to(probe=key.probe + k) for k in range(len(alphas))]
        used = [k for k in range(len(alphas)) if not waits or alphas[k]] or [0]
        left = torch.cat([self._left(keys[k], alphas[k : k + 1], param.device) for k in used], 1)
        right = torch.cat([self.probed(keys[k]).factor(param.device) for k in used], 1)
        ops.add_outer_(param, left, right, 1.0, self._draw(key), decay=decay, rounding=self.rounding)

    def coords(self, param: Tensor, key: Key, span: slice) -> Tensor:
        n = self.shape[1]
        first, last = span.start // n, -(-span.stop // n)
        rows = torch.zeros((last - first, n), dtype=torch.float32, device=param.device)
        a, b = self._left(key, 1.0, param.device)[first:last], self.probed(key).factor(param.device)
        ops.add_outer_(rows, a, b, 1.0, self._draw(key))
        return rows.view(-1)[span.start - first * n : span.stop - first * n]

    def lift_(self, param: Tensor, delta: Tensor, span: slice, alpha: float, key: Key, decay: float) -> None:
        self.dense.lift_(param, delta, span, alpha, key, decay)

    def transport(self, state: Tensor, old: Basis) -> Tensor:
        return state

    def _left(self, key: Key, scale: float | Alphas, device: torch.device) -> Tensor:
        """scale·A, (m, r)."""
        out = torch.empty((self.shape[0], self.rank), dtype=torch.float32, device=device)
        return ops.fill_(out, self._draw(key), scale)

    def _draw(self, key: Key) -> Draw:
        return Draw(key, self.site.offset, self.site.distribution)
