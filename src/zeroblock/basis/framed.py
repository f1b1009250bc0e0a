"""The basis of directions between orthonormal frames, U z Vᵀ or U z."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

from .. import ops
from ..noise import BASIS, Distribution, Draw, Key
from .base import CHUNK, Basis, Site
from .held import Held


@dataclasses.dataclass(frozen=True)
class Framed(Held):
    """Pz = gain·U z Vᵀ with z of r×r, or gain·U z with z of r×n; m×n is the tensor as a matrix.

    U of m×r and V of n×r have orthonormal columns: the Q of the QR decomposition of seeded normal noise, with
    the signs that make R's diagonal positive.  They are computed once per turn, in fp64, and held in fp32 during the
    turn.  The machine's libraries compute products and decompositions, but rounding to fp32 removes nearly all of
    their differences.  Updates are sums in the order that ``ops`` specifies; without V, a copy for measuring uses
    torch's faster product.  A captured step would hold on to the frames of its turn, so steps are not captured.

    With ``held``, B of r×r in fp32, steps move B and not the tensor W: θ is W + gain·U B Vᵀ until :meth:`fold_`.

    Args:
        shape: m and n.
        rank: r.
        both: whether there is a V.
        gain: factor on the lifted coordinates.
        key: addresses the frames.
        site: the tensor's place among the weights.
        device: the device that holds the frames.
        held: B, if steps are held; only with both frames.
    """

    shape: tuple[int, int]
    rank: int
    both: bool
    gain: float
    key: Key
    site: Site
    device: torch.device
    held: Tensor | None = dataclasses.field(default=None, compare=False)

    @property
    def spread(self) -> float:
        return self.gain * math.sqrt(self.size / math.prod(self.shape))

    @property
    def factor_shape(self) -> tuple[int, int] | None:
        return (self.shape[1], self.rank) if self.both else None

    @property
    def grid(self) -> tuple[int, int]:
        return self.rank, self.rank if self.both else self.shape[1]

    @functools.cached_property
    def left(self) -> Tensor:
        """U, (m, r)."""
        return self._frame(self.shape[0], 1)

    @functools.cached_property
    def right(self) -> Tensor:
        """V, (n, r)."""
        return self._frame(self.shape[1], 0)

    def factor(self, device: torch.device, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        """scale·V, (n, r)."""
        return (self.right * scale).to(device, dtype)

    def coordinates_(self, out: Tensor, key: Key, scale: float, share: float = 1.0) -> Tensor:
        """out ← share·gain·U (B + scale·z), (m, r) of any dtype."""
        share *= self.gain
        z = ops.fill_(self.new(self.device), self.draw(key), share * scale, start=self.held, decay=share)
        return out.copy_(self._between(z))

    def perturbed(self, param: Tensor, key: Key, eps: float) -> Tensor:
        copy = param.detach().clone(memory_format=torch.contiguous_format)
        bits = key.to(probe=key.probe + 1)  # not the update's rounding bits, which are those of probe 0
        z, flip = ops.fill_(self.new(self.device), self.draw(key), eps, start=self.held), eps < 0
        if self.both:
            self.write_(copy, z, 1.0, bits, 1.0, flip)
            return copy
        m, n = self.shape
        rows = max(1, 4096 // n, min(CHUNK // n, m // 16))  # a sixteenth of a large tensor at most
        with torch.autocast(copy.device.type, enabled=False):  # the forward pass may run under autocast
            for a in range(0, m, rows):
                part, lifted = copy.view(-1)[a * n : (a + rows) * n], self.left[a : a + rows] @ z
                ops.add_(part, lifted, self.gain, self.draw(bits).at(a * n), rounding=self.rounding, flip=flip)
        return copy

    def transport(self, state: Tensor, old: Basis) -> Tensor:
        """The part of an old step that lies between the new frames: (UᵀU_old) z (V_oldᵀV)."""
        assert isinstance(old, Framed)  # the same subspace made both
        z = self.left.T.double() @ old.left.double() @ state.view(self.grid).double()
        if self.both:
            z = z @ (old.right.T.double() @ self.right.double())
        return z.float().reshape(-1)

    def empty(self, device: torch.device) -> Tensor | None:
        return super().empty(device) if self.both else None

    def _frame(self, rows: int, probe: int) -> Tensor:
        draw = Draw(self.key.to(stream=BASIS, probe=probe), self.site.offset, Distribution.NORMAL)
        return orthonormal(ops.normal(draw, (rows, self.rank), device=self.device).double()).float()

    def _between(self, z: Tensor) -> Tensor:
        """U z for z of r×r, computed by ``ops``, whose products are the same to the bit on every device."""
        out = torch.zeros((self.shape[0], self.rank), dtype=torch.float32, device=self.device)
        return ops.add_outer_(out, self.left, z.T, 1.0, Draw(self.key))

    def write_(self, param: Tensor, z: Tensor, alpha: float, key: Key, decay: float, flip: bool = False) -> None:
        """W ← decay·W + alpha·gain·U z Vᵀ, or alpha·gain·U z without V."""
        left, right = (self._between(z), self.right) if self.both else (self.left, z.T)
        ops.add_outer_(
            param, left, right, alpha * self.gain, self.draw(key), decay=decay, rounding=self.rounding, flip=flip
        )


TALL = 4
"""Noise with at least this many rows per column is conditioned well enough for :func:`orthonormal` to square it."""


def orthonormal(noise: Tensor) -> Tensor:
    """Q of the QR decomposition with R's diagonal positive, (m, r) in fp64.

    RᵀR = XᵀX is a Cholesky decomposition of r×r, and Q = X R⁻¹: both are products, whereas a QR of m×r is a sequence of
    m×r steps that keep a GPU waiting.  Normal noise of m ≥ 4r rows has singular values within a factor of about 3 (6
    for small r), so that Q loses one or two of sixteen digits.
    """
    if noise.shape[0] < TALL * noise.shape[1]:
        q, r = torch.linalg.qr(noise)
        frame: Tensor = q * torch.where(r.diagonal() < 0, -1.0, 1.0)
    else:
        r = torch.linalg.cholesky(noise.T @ noise, upper=True)
        frame = torch.linalg.solve_triangular(r, noise, upper=True, left=False)
    return frame
