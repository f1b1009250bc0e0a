"""The basis whose coordinates are the weights one by one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .. import ops
from ..noise import Draw, Key, Mask, RandomMask, Rounding
from ..shard import Box
from .base import CHUNK, Alphas, Basis, Site


@dataclasses.dataclass(frozen=True)
class Elementwise(Basis):
    """P is the identity, or a diagonal 0/1 matrix: ``mask`` says which coordinates exist.

    Args:
        numel: the number of elements of the tensor.
        site: the tensor's place among the weights.
        mask: selects the elements that take noise; all by default.
        box: the part of the tensor that this is; all of it by default.
    """

    numel: int
    site: Site
    mask: Mask | None = None
    box: Box | None = None

    capturable = carries = pairs = replays_together = True

    @property
    def size(self) -> int:
        return self.numel

    @property
    def rounding(self) -> Rounding:
        return self.site.rounding

    def elementwise(self, key: Key) -> Draw:
        draw = Draw(key, self.site.offset, self.site.distribution, self.mask)
        return draw if self.box is None else draw.to(offset=draw.offset + self.box.offset, rows=self.box.rows)

    @property
    def uncut(self) -> Elementwise:
        return self if self.box is None else dataclasses.replace(self, numel=math.prod(self.box.shape), box=None)

    def cut(self, box: Box) -> Elementwise:
        return dataclasses.replace(self, numel=box.numel, box=box)

    def perturbed(self, param: Tensor, key: Key, eps: float) -> Tensor:
        return ops.perturb(param, self.elementwise(key), eps, rounding=self.rounding)

    def mirrored(self, param: Tensor, key: Key, eps: float) -> tuple[Tensor, Tensor]:
        return ops.perturb_pair(param, self.elementwise(key), eps, rounding=self.rounding)

    def add_(self, param: Tensor, key: Key, alphas: Alphas, decay: float) -> None:
        ops.add_noise_(param, self.elementwise(key), alphas, decay=decay, rounding=self.rounding)

    def spans(self) -> Iterator[slice]:
        for start in range(0, self.numel, CHUNK):
            yield slice(start, min(start + CHUNK, self.numel))

    def coords(self, param: Tensor, key: Key, span: slice) -> Tensor:
        flat, draw = _flat(param)[span], self.elementwise(key).at(span.start)
        z = torch.empty(flat.shape, dtype=torch.float32, device=param.device)
        if isinstance(self.mask, RandomMask):
            return ops.add_noise_(z.zero_(), draw, 1.0)
        noise = ops.fill_(z, draw.to(mask=None))
        if self.mask is None:
            return noise
        return noise.mul_(flat.abs() <= self.mask.threshold)  # the mask compares weights, and z holds none

    def lift_(self, param: Tensor, delta: Tensor, span: slice, alpha: float, key: Key, decay: float) -> None:
        flat = _flat(param)
        draw = self.elementwise(key).at(span.start)
        ops.add_(flat[span], delta, alpha, draw, decay=decay, rounding=self.rounding)
        if flat.data_ptr() != param.data_ptr():  # a strided tensor was copied
            param.detach().copy_(flat.view(param.shape))

    def matrix(self, param: Tensor) -> tuple[int, int] | None:
        whole = param.dim() >= 2 and param.numel() and self.mask is None
        return (param.shape[0], self.numel // param.shape[0]) if whole else None

    def transport(self, state: Tensor, old: Basis) -> Tensor:
        return state

    def clocked(self, clock: Tensor) -> Elementwise:
        if not isinstance(self.mask, RandomMask):
            return self
        return dataclasses.replace(self, mask=RandomMask(self.mask.key.to(clock=clock), self.mask.limit))

    def memory(self) -> tuple[object, ...]:
        return (self.site.initial,)


def _flat(param: Tensor) -> Tensor:
    return param.detach().reshape(-1)
