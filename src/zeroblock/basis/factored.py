"""The basis of low-rank directions U Vᵀ."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from .. import ops
from ..noise import BASIS, Draw, Key
from ..shard import Box
from .base import Basis, Site
from .held import Held


@dataclasses.dataclass(frozen=True)
class Factored(Held):
    """Pz = z Vᵀ with z of m×r and V of n×r, drawn anew each turn; m×n is the tensor as a matrix.

    With ``held``, B of m×r in fp32, a step writes B and not the whole tensor W: θ is W + B Vᵀ until :meth:`fold_` adds
    B Vᵀ to W.

    Args:
        shape: m and n, of the tensor or of the part of it that this process holds.
        rank: r.
        key: addresses V.
        site: the tensor's place among the weights.
        stale: reproduce a bug of LOZO's code: on the step that draws V, the update uses another U than the
            measurement.
        held: B, if steps are held.
        box: the part of the tensor that this is; all of it by default.  A part takes its rows of z and of V.
    """

    shape: tuple[int, int]
    rank: int
    key: Key
    site: Site
    stale: bool = False
    held: Tensor | None = dataclasses.field(default=None, compare=False)
    box: Box | None = None

    @property
    def grid(self) -> tuple[int, int]:
        return self.shape[0], self.rank

    @property
    def capturable(self) -> bool:
        return not self.stale

    @property
    def replays_together(self) -> bool:
        return not self.stale

    @property
    def spread(self) -> float:
        return math.sqrt(self.rank)

    @property
    def factor_shape(self) -> tuple[int, int]:
        return self.shape[1], self.rank

    def factor(self, device: torch.device, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        """scale·V, (n, r), drawn anew."""
        v = self._whole_factor(device, scale, dtype)
        return v if self.box is None else self.box.columns(v)

    def _whole_factor(self, device: torch.device, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        """scale·V of the whole tensor."""
        n = self.shape[1] if self.box is None else math.prod(self.box.shape[1:])
        out = torch.empty((n, self.rank), dtype=dtype, device=device)
        return ops.fill_(out, self.draw(self.key.to(stream=BASIS)), scale)

    @property
    def uncut(self) -> Factored | None:
        if self.box is None:
            return self
        if self.held is not None:  # other processes hold other rows of it
            return None
        m, *rest = self.box.shape
        return dataclasses.replace(self, shape=(m, math.prod(rest)), box=None)

    def cut(self, box: Box) -> Factored:
        return dataclasses.replace(self, shape=box.matrix, box=box)

    def coordinates_(self, out: Tensor, key: Key, scale: float, share: float = 1.0) -> Tensor:
        """out ← share·(B + scale·U), the coordinates of θ + scale·Pz relative to W; out is (m, r) of any dtype."""
        return ops.fill_(out, self.coordinates(key), share * scale, start=self.held, decay=share)

    def perturbed(self, param: Tensor, key: Key, eps: float) -> Tensor:
        copy = param.detach().clone(memory_format=torch.contiguous_format)
        bits = key.to(probe=key.probe + 1)  # not the update's rounding bits, which are those of probe 0
        self.write_(copy, self.coordinates_(self.new(param.device), key, eps), 1.0, bits, 1.0, eps < 0)
        return copy

    def transport(self, state: Tensor, old: Basis) -> Tensor:
        assert isinstance(old, Factored)  # the same subspace made both
        v = self._whole_factor(state.device)
        with torch.autocast(state.device.type, enabled=False):  # the loop's own would round the state to 16 bits
            overlap = old._whole_factor(state.device).T @ v / len(v)
            return (state.view(self.shape[0], self.rank) @ overlap).view(-1)

    def clocked(self, clock: Tensor) -> Factored:
        return dataclasses.replace(self, key=self.key.to(clock=clock))

    def memory(self) -> tuple[object, ...]:
        return () if self.held is None else (self.held.data_ptr(),)

    def write_(self, param: Tensor, z: Tensor, alpha: float, key: Key, decay: float, flip: bool = False) -> None:
        v = self.factor(param.device)
        ops.add_outer_(param, z, v, alpha, self._bits(key), decay=decay, rounding=self.rounding, flip=flip)

    def coordinates(self, key: Key) -> Draw:
        """The draw of U."""
        draw = self.draw(key)
        return draw if self.box is None else draw.at(self.box.first_row * self.rank)

    def _bits(self, key: Key) -> Draw:
        """The draw of the rounding bits."""
        draw = self.draw(key)
        return draw if self.box is None else draw.to(offset=draw.offset + self.box.offset, rows=self.box.rows)

    def update_key(self, key: Key) -> Key:
        """The measurement's address; with ``stale``, another one on the steps that draw V."""
        return key.to(stream=BASIS, probe=key.probe + 1) if self.stale and key.step == self.key.step else key
