"""The paper's projections M, each a composition of the library's own parts.

    low-rank        subspace Haar(s): M = UUᵀ, U uniform among the d×s matrices with orthonormal columns
    sparse          subspace zeroblock.Bernoulli(s/d): each coordinate with probability s/d
    block-sparse    partition into d/s blocks, schedule zeroblock.Uniform
    aligned         subspace Aligned(s, γ): ⌈sγ⌉ eigenvectors of H among the columns of U

A step draws z in s coordinates and moves along Uz, which is distributed as UUᵀu with u in d coordinates.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

import torch
from torch import Tensor

from ..basis import Alphas, Basis, Site
from ..block import Block, whole
from ..errors import ZeroBlockError
from ..estimator import TwoSided
from ..noise import BASIS, Draw, Key
from ..ops import normal
from ..optimizer import ZeroOrder
from ..schedule import Ascending, Uniform
from ..subspace import Bernoulli, Subspace
from .quadratic import Hessian, Quadratic


def orthonormalised(x: Tensor) -> Tensor:
    """Make columns orthonormal by Cholesky: X = UR with R's diagonal positive; (d, s) or (n, d, s).

    This factorisation is unique, so a Gaussian X gives the Haar measure; LAPACK's QR does not, because its
    signs are arbitrary.  At 256×64 it takes a third of the time of a QR.
    """
    r = torch.linalg.cholesky(x.mT @ x, upper=True)
    u: Tensor = torch.linalg.solve_triangular(r, x, upper=True, left=False)
    return u


@dataclasses.dataclass(frozen=True)
class Orthonormal(Basis):
    """P = U with orthonormal columns, for a tensor of d elements; U is kept, d×s, never UUᵀ."""

    columns: Tensor
    site: Site

    carries = True

    @property
    def size(self) -> int:
        return self.columns.shape[1]

    def _lifted(self, z: Tensor, param: Tensor) -> Tensor:
        return (self.columns @ z.double()).to(param.dtype).view(param.shape)

    def perturbed(self, param: Tensor, key: Key, eps: float) -> Tensor:
        return param.detach() + eps * self._lifted(self.coords(param, key, slice(None)), param)

    def combined(self, param: Tensor, key: Key, alphas: Alphas, span: slice) -> Tensor:
        """The coordinates in fp64, like the lab's quadratics."""
        z = torch.zeros(self.size, dtype=torch.float64)
        for k, alpha in enumerate(alphas):
            z.add_(self.coords(param, key.to(probe=key.probe + k), span), alpha=float(alpha))
        return z

    def coords(self, param: Tensor, key: Key, span: slice) -> Tensor:
        return normal(Draw(key, self.site.offset, self.site.distribution), (self.size,))[span]

    def lift_(self, param: Tensor, delta: Tensor, span: slice, alpha: float, key: Key, decay: float) -> None:
        param.detach().mul_(decay).add_(self._lifted(delta, param), alpha=alpha)

    def transport(self, state: Tensor, old: Basis) -> Tensor:
        assert isinstance(old, Orthonormal)
        return (self.columns.T @ (old.columns @ state.double())).float()


@dataclasses.dataclass(frozen=True)
class Haar(Subspace):
    """A subspace of s dimensions, uniform on the Grassmannian, redrawn each turn; for modules of one tensor."""

    s: int

    def basis(self, param: Tensor, key: Key, site: Site) -> Basis:
        _check_size(self.s, param.numel())
        x = normal(Draw(key.to(stream=BASIS), site.offset), (param.numel(), self.s), dtype=torch.float64)
        return Orthonormal(orthonormalised(x), site)


@dataclasses.dataclass(frozen=True)
class Aligned(Subspace):
    """⌈sγ⌉ eigenvectors of H drawn at random, the other columns Haar in their complement.

        U = [M₁, M₂]      M₂ = orth(R - M₁M₁ᵀR)

    Args:
        s: number of columns.
        gamma: γ in [0, 1].
        vectors: (d, r), the eigenvectors of H with nonzero eigenvalues.
    """

    s: int
    gamma: float
    vectors: Tensor = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ZeroBlockError(f"gamma must be in [0, 1], got {self.gamma}")
        if self.chosen > self.vectors.shape[1]:
            raise ZeroBlockError(
                f"gamma {self.gamma} asks for {self.chosen} eigenvectors of a Hessian of rank {self.vectors.shape[1]}"
            )

    @property
    def chosen(self) -> int:
        """⌈sγ⌉; rounding first keeps 100 × 0.07 from giving 8."""
        return math.ceil(round(self.s * self.gamma, 9))

    def basis(self, param: Tensor, key: Key, site: Site) -> Basis:
        d, r = self.vectors.shape
        _check_size(self.s, d)
        address = key.to(stream=BASIS)
        order = normal(Draw(address.to(probe=1), site.offset), (r,)).argsort()
        first = self.vectors[:, order[: self.chosen]]
        if self.chosen == self.s:
            return Orthonormal(first, site)
        x = normal(Draw(address, site.offset), (d, self.s - self.chosen), dtype=torch.float64)
        rest = orthonormalised(x - first @ (first.T @ x))
        return Orthonormal(torch.cat([first, rest], dim=1), site)


def _check_size(s: int, d: int) -> None:
    if not 1 <= s <= d:
        raise ZeroBlockError(f"a subspace of {s} dimensions does not fit a space of {d}")


class Projection(Protocol):
    """A random M with E[Tr M] = s, which an optimizer draws at every step."""

    @property
    def label(self) -> str:
        """The name in figures."""
        ...

    @property
    def s(self) -> int: ...

    def optimizer(self, hessian: Hessian, start: Tensor, lr: float, eps: float, seed: int) -> ZeroOrder:
        """Subspace ZO-SGD on the quadratic of ``hessian``, with M redrawn at every step."""
        ...


@dataclasses.dataclass(frozen=True)
class LowRank:
    """M = UUᵀ, U from the Haar measure."""

    s: int
    label = "low-rank"

    def optimizer(self, hessian: Hessian, start: Tensor, lr: float, eps: float, seed: int) -> ZeroOrder:
        return _dense(hessian, start, lr, eps, seed, Haar(self.s))


@dataclasses.dataclass(frozen=True)
class Sparse:
    """M = diag(m), mᵢ ~ Bernoulli(s/d)."""

    s: int
    label = "sparse"

    def optimizer(self, hessian: Hessian, start: Tensor, lr: float, eps: float, seed: int) -> ZeroOrder:
        _check_size(self.s, hessian.dim)
        return _dense(hessian, start, lr, eps, seed, Bernoulli(self.s / hessian.dim))


@dataclasses.dataclass(frozen=True)
class BlockSparse:
    """M = diag(m), m the indicator of one of d/s blocks, uniform: block coordinate descent."""

    s: int
    label = "block-sparse"

    def optimizer(self, hessian: Hessian, start: Tensor, lr: float, eps: float, seed: int) -> ZeroOrder:
        _check_size(self.s, hessian.dim)
        model = Quadratic(hessian, start, self.s)
        blocks = [Block(name, (name,)) for name, _ in model.named_parameters()]
        return ZeroOrder(model, lr, partition=blocks, schedule=Uniform(), estimator=TwoSided(eps), seed=seed)


@dataclasses.dataclass(frozen=True)
class Controlled:
    """The low-rank projection whose alignment γ controls."""

    s: int
    gamma: float

    @property
    def label(self) -> str:
        return f"γ = {self.gamma:g}"

    def optimizer(self, hessian: Hessian, start: Tensor, lr: float, eps: float, seed: int) -> ZeroOrder:
        return _dense(hessian, start, lr, eps, seed, Aligned(self.s, self.gamma, hessian.range()))


def _dense(hessian: Hessian, start: Tensor, lr: float, eps: float, seed: int, subspace: Subspace) -> ZeroOrder:
    model = Quadratic(hessian, start)
    return ZeroOrder(
        model, lr, partition=whole, schedule=Ascending(), subspace=subspace, estimator=TwoSided(eps), seed=seed
    )


THREE: tuple[type[LowRank] | type[Sparse] | type[BlockSparse], ...] = (LowRank, Sparse, BlockSparse)
"""The instantiations of Definition 3.5, in the paper's order."""
