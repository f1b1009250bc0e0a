"""The basis of low-rank directions U Vᵀ."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .. import ops
from ..noise import BASIS, Draw, Key, Rounding
from .base import Alphas, Basis, Site


@dataclasses.dataclass(frozen=True)
class Factored(Basis):
    """Pz = z Vᵀ with z of m×r and V of n×r, drawn anew each turn; m×n is the tensor as a matrix.

    With ``held``, B of m×r in fp32, steps move B and not the tensor W, which they would have to
    write whole: θ is W + B Vᵀ until :meth:`fold_` makes it W again.

    Args:
        shape: m and n.
        rank: r.
        key: addresses V.
        site: where the tensor lies.
        stale: reproduce a bug of LOZO's code: on the step that draws V the update uses another U than the
            measurement did.
        held: B, where steps are held.
    """

    shape: tuple[int, int]
    rank: int
    key: Key
    site: Site
    stale: bool = False
    held: Tensor | None = dataclasses.field(default=None, compare=False)

    carries = True

    @property
    def size(self) -> int:
        return self.shape[0] * self.rank

    @property
    def rounding(self) -> Rounding:
        return self.site.rounding

    @property
    def capturable(self) -> bool:
        return not self.stale

    @property
    def replays_together(self) -> bool:
        return not self.stale

    @property
    def factor_shape(self) -> tuple[int, int]:
        return self.shape[1], self.rank

    @property
    def behind(self) -> bool:
        return self.held is not None

    def factor(self, device: torch.device, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        """scale·V, (n, r), drawn anew."""
        out = torch.empty((self.shape[1], self.rank), dtype=dtype, device=device)
        return ops.fill_(out, self._draw(self.key.to(stream=BASIS)), scale)

    def coordinates_(self, out: Tensor, key: Key, scale: float, share: float = 1.0) -> Tensor:
        """out ← share·(B + scale·U), the coordinates between W and θ + scale·Pz; out is (m, r) of any dtype."""
        return ops.fill_(out, self._draw(key), share * scale, start=self.held, decay=share)

    def matrix(self, param: Tensor) -> tuple[int, int]:
        return self.shape[0], self.rank

    def perturbed(self, param: Tensor, key: Key, eps: float) -> Tensor:
        copy = param.detach().clone(memory_format=torch.contiguous_format)
        bits = key.to(probe=key.probe + 1)  # other rounding bits than the update's, which are those of probe 0
        z, v = self.coordinates_(self._new(param.device), key, eps), self.factor(param.device)
        return ops.add_outer_(copy, z, v, 1.0, self._draw(bits), rounding=self.rounding, flip=eps < 0)

    def add_(self, param: Tensor, key: Key, alphas: Alphas, decay: float) -> None:
        if decay == 1.0 and not isinstance(alphas, Tensor) and not any(alphas):
            return
        if self.held is not None:
            ops.add_noise_(self.held, self._draw(self._update_key(key)), alphas)
            return
        z = ops.fill_(self._new(param.device), self._draw(self._update_key(key)), alphas)
        self._write_(param, z, 1.0, key, decay)

    def coords(self, param: Tensor, key: Key, span: slice) -> Tensor:
        return ops.fill_(self._new(param.device), self._draw(self._update_key(key))).view(-1)[span]

    def lift_(self, param: Tensor, delta: Tensor, span: slice, alpha: float, key: Key, decay: float) -> None:
        z = delta.view(self.shape[0], self.rank)
        if self.held is not None:
            self.held.add_(z, alpha=alpha)
            return
        self._write_(param, z, alpha, key, decay)

    def transport(self, state: Tensor, old: Basis) -> Tensor:
        assert isinstance(old, Factored)  # the same subspace made both
        overlap = old.factor(state.device).T @ self.factor(state.device) / self.shape[1]
        return (state.view(self.shape[0], self.rank) @ overlap).view(-1)

    def clocked(self, clock: Tensor) -> Factored:
        return dataclasses.replace(self, key=self.key.to(clock=clock))

    def memory(self) -> tuple[object, ...]:
        return () if self.held is None else (self.held.data_ptr(),)

    def holding(self, held: Tensor | None) -> Factored:
        return dataclasses.replace(self, held=held)

    def empty(self, device: torch.device) -> Tensor:
        return self._new(device).zero_()

    def fold_(self, param: Tensor, key: Key) -> None:
        """W ← W + B Vᵀ, B ← 0."""
        assert self.held is not None
        self._write_(param, self.held, 1.0, key, 1.0)
        self.held.zero_()

    def _draw(self, key: Key) -> Draw:
        return Draw(key, self.site.offset, self.site.distribution)

    def _new(self, device: torch.device) -> Tensor:
        """(m, r) in fp32, whatever torch's default dtype."""
        return torch.empty((self.shape[0], self.rank), dtype=torch.float32, device=device)

    def _write_(self, param: Tensor, z: Tensor, alpha: float, key: Key, decay: float) -> None:
        v, draw = self.factor(param.device), self._draw(key)
        ops.add_outer_(param, z, v, alpha, draw, decay=decay, rounding=self.rounding)

    def _update_key(self, key: Key) -> Key:
        """Where the update draws U: the measurement's address, or as published on the steps that draw V."""
        return key.to(stream=BASIS, probe=key.probe + 1) if self.stale and key.step == self.key.step else key
