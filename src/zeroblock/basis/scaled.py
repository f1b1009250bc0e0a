"""A basis in units of its tensor's weights."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..noise import Draw, Key
from ..shard import Box
from .base import Alphas, Basis
from .wrapped import Wrapped


@dataclasses.dataclass(frozen=True)
class Scaled(Wrapped):
    """P = scale·Q for another basis Q, which does all the work with distances multiplied by ``scale``.

    Steps that are held in coordinates are held in Q's coordinates.

    Args:
        inner: Q.
        scale: a number that single precision holds exactly.
    """

    inner: Basis
    scale: float = 1.0

    @property
    def capturable(self) -> bool:
        return self.inner.capturable

    @property
    def carries(self) -> bool:
        return self.inner.carries

    @property
    def pairs(self) -> bool:
        return self.inner.pairs

    @property
    def behind(self) -> bool:
        return self.inner.behind

    @property
    def replays_together(self) -> bool:
        return self.inner.replays_together

    @property
    def factor_shape(self) -> tuple[int, int] | None:
        return self.inner.factor_shape

    def matrix(self, param: Tensor) -> tuple[int, int] | None:
        return self.inner.matrix(param)

    def probed(self, key: Key) -> Scaled:
        return dataclasses.replace(self, inner=self.inner.probed(key))

    def coords(self, param: Tensor, key: Key, span: slice) -> Tensor:
        return self.inner.coords(param, key, span)

    def lift_(self, param: Tensor, delta: Tensor, span: slice, alpha: float, key: Key, decay: float) -> None:
        self.inner.lift_(param, delta, span, self.scale * alpha, key, decay)

    def perturbed(self, param: Tensor, key: Key, eps: float) -> Tensor:
        return self.inner.perturbed(param, key, self.scale * eps)

    def copied_bytes(self, param: Tensor) -> int:
        return self.inner.copied_bytes(param)

    def mirrored(self, param: Tensor, key: Key, eps: float) -> tuple[Tensor, Tensor]:
        return self.inner.mirrored(param, key, self.scale * eps)

    def add_(self, param: Tensor, key: Key, alphas: Alphas, decay: float) -> None:
        self.inner.add_(param, key, times(alphas, self.scale), decay)

    def combined(self, param: Tensor, key: Key, alphas: Alphas, span: slice) -> Tensor:
        return self.inner.combined(param, key, alphas, span)

    def transport(self, state: Tensor, old: Basis) -> Tensor:
        assert isinstance(old, Scaled)  # the same subspace made both, and a tensor's scale never changes
        return self.inner.transport(state, old.inner)

    def elementwise(self, key: Key) -> Draw | None:
        return self.inner.elementwise(key)

    @property
    def uncut(self) -> Scaled | None:
        inner = self.inner.uncut
        return None if inner is None else dataclasses.replace(self, inner=inner)

    def cut(self, box: Box) -> Scaled:
        return dataclasses.replace(self, inner=self.inner.cut(box))

    def clocked(self, clock: Tensor) -> Scaled:
        return dataclasses.replace(self, inner=self.inner.clocked(clock))

    def memory(self) -> tuple[object, ...]:
        return (self.scale, *self.inner.memory())

    def factor(self, device: torch.device, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.inner.factor(device, scale, dtype)

    def coordinates_(self, out: Tensor, key: Key, scale: float, share: float = 1.0) -> Tensor:
        return self.inner.coordinates_(out, key, self.scale * scale, share)

    def holding(self, held: Tensor | None) -> Scaled:
        return dataclasses.replace(self, inner=self.inner.holding(held))

    def empty(self, device: torch.device) -> Tensor | None:
        return self.inner.empty(device)

    def fold_(self, param: Tensor, key: Key) -> None:
        self.inner.fold_(param, key)


def times(alphas: Alphas, scale: float) -> Alphas:
    """Coefficients times a scale, in single precision: the same bits on the host as on the device."""
    if isinstance(alphas, Tensor):
        return alphas * scale
    product: list[float] = (torch.tensor(list(alphas), dtype=torch.float32) * scale).tolist()
    return product
