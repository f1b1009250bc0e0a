"""Subspace alignment ρ = Tr(MᵀHM) / λmax(H): exact for a given M, drawn many at a time, and in closed form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import ZeroBlockError
from .quadratic import Hessian

CHUNK = 1 << 24
"""Gaussian numbers drawn at a time: 64 MiB in fp32."""


def alignment(hessian: Hessian, factor: Tensor) -> float:
    """ρ of M = UUᵀ from U, (d, s), with orthonormal columns: Tr(UᵀHU) / λmax."""
    return float((factor * (hessian @ factor)).sum()) / hessian.top


def masked(hessian: Hessian, mask: Tensor) -> Tensor:
    """ρ of M = diag(m) for masks of (d,) or (n, d): Σᵢ mᵢHᵢᵢ / λmax."""
    return mask.to(hessian.diagonal) @ hessian.diagonal / hessian.top


@dataclasses.dataclass(frozen=True)
class Moments:
    """Mean and variance of ρ over M."""

    mean: float
    variance: float


def _share(hessian: Hessian, s: int) -> tuple[int, float]:
    d = hessian.dim
    if not 1 <= s <= d:
        raise ZeroBlockError(f"s must be in [1, d = {d}], got {s}")
    return d, s / d


def expected(hessian: Hessian, s: int) -> float:
    """E[ρ] = s·Tr(H) / (d·λmax) (Proposition 3.4): the same for every M with E[M] = (s/d)·I."""
    return _share(hessian, s)[1] * hessian.intdim


def expected_controlled(hessian: Hessian, s: int, chosen: int) -> float:
    """E[ρ] when ``chosen`` columns are random eigenvectors of H and the others Haar in their complement.

    E[ρ] = (k/r)·intdim + (s - k)/(d - k)·(1 - k/r)·intdim
    """
    d, r = hessian.dim, hessian.rank
    if not 0 <= chosen <= min(r, s):
        raise ZeroBlockError(f"{chosen} eigenvectors: choose between 0 and min(r, s) = {min(r, s)}")
    taken = chosen / r
    rest = (s - chosen) / (d - chosen) if d > chosen else 0.0
    return hessian.intdim * (taken + rest * (1 - taken))


def moments_low_rank(hessian: Hessian, s: int) -> Moments:
    """Haar: Var[ρ] = 2s(d-s) / (d(d-1)(d+2)) · (‖H‖_F² - Tr(H)²/d) / λmax²."""
    d, _ = _share(hessian, s)
    excess = float(hessian.spectra.square().sum()) - hessian.trace**2 / d
    return Moments(expected(hessian, s), 2 * s * (d - s) / (d * (d - 1) * (d + 2)) * excess / hessian.top**2)


def moments_bernoulli(hessian: Hessian, s: int) -> Moments:
    """Independent coordinates: Var[ρ] = p(1-p)·ΣHᵢᵢ² / λmax², p = s/d."""
    _, p = _share(hessian, s)
    return Moments(expected(hessian, s), p * (1 - p) * float(hessian.diagonal.square().sum()) / hessian.top**2)


def moments_exact(hessian: Hessian, s: int) -> Moments:
    """Exactly s of d coordinates: Var[ρ] = p(1-p)·d/(d-1)·(ΣHᵢᵢ² - Tr(H)²/d) / λmax²."""
    d, p = _share(hessian, s)
    excess = float(hessian.diagonal.square().sum()) - hessian.trace**2 / d
    return Moments(expected(hessian, s), p * (1 - p) * d / (d - 1) * excess / hessian.top**2)


def block_values(hessian: Hessian, s: int) -> Tensor:
    """ρ of each of the d/s blocks of s neighbouring coordinates, (d/s,)."""
    d, _ = _share(hessian, s)
    if d % s:
        raise ZeroBlockError(f"blocks of {s} coordinates do not divide a dimension of {d}")
    return hessian.diagonal.view(-1, s).sum(1) / hessian.top


def moments_block_sparse(hessian: Hessian, s: int) -> Moments:
    """One block of d/s: mean and variance over the blocks' values."""
    values = block_values(hessian, s)
    return Moments(float(values.mean()), float(values.var(correction=0)))


def draw_low_rank(hessian: Hessian, s: int, draws: int, generator: torch.Generator) -> Tensor:
    """ρ of ``draws`` Haar subspaces, (draws,), from Gaussian X of d×s each, in the eigenbasis of H.

        ρ = Tr((XᵀX)⁻¹ XᵀΛX) / λmax

    The Haar measure is the same in every orthonormal basis, so the spectrum stands for H; rows of X whose
    eigenvalue is zero enter only XᵀX.  Neither UUᵀ nor U is formed.  1,000 draws at d = 1024, s = 256
    take about 10 s on one core, in fp32 (ρ is good to 1e-6).
    """
    d, _ = _share(hessian, s)
    spectrum = hessian.spectra.reshape(-1).sort(descending=True).values.float()
    live = hessian.rank
    root = spectrum[:live].sqrt().unsqueeze(-1)
    parts = []
    for start in range(0, draws, max(1, CHUNK // (d * s))):
        n = min(max(1, CHUNK // (d * s)), draws - start)
        x = torch.randn(n, d, s, generator=generator)
        factor = torch.linalg.cholesky(x.mT @ x)
        weighted = x[:, :live] * root  # (n, r, s)
        if live > s:  # ‖R⁻ᵀ(√Λ X)ᵀ‖² costs r·s² flops either way; the smaller product is (s, s)
            solved = torch.cholesky_solve(weighted.mT @ weighted, factor).diagonal(dim1=1, dim2=2).sum(1)
        else:
            solved = torch.linalg.solve_triangular(factor, weighted.mT, upper=False).square().sum((1, 2))
        parts.append(solved.double() / hessian.top)
    return torch.cat(parts)


def draw_bernoulli(hessian: Hessian, s: int, draws: int, generator: torch.Generator) -> Tensor:
    """ρ of masks whose coordinates are kept independently with probability s/d."""
    d, p = _share(hessian, s)
    return masked(hessian, torch.rand(draws, d, generator=generator) < p)


def draw_exact(hessian: Hessian, s: int, draws: int, generator: torch.Generator) -> Tensor:
    """ρ of masks that keep exactly s of d coordinates, as the paper's experiments do."""
    d, _ = _share(hessian, s)
    kept = torch.rand(draws, d, generator=generator).topk(s, dim=1).indices
    return hessian.diagonal[kept].sum(1) / hessian.top


def draw_block_sparse(hessian: Hessian, s: int, draws: int, generator: torch.Generator) -> Tensor:
    """ρ of blocks that are drawn uniformly from the d/s."""
    values = block_values(hessian, s)
    return values[torch.randint(len(values), (draws,), generator=generator)]


def largest_low_rank(hessian: Hessian, s: int) -> float:
    """The s largest eigenvalues over λmax (Ky Fan)."""
    return float(hessian.spectra.reshape(-1).topk(s).values.sum()) / hessian.top


def largest_exact(hessian: Hessian, s: int) -> float:
    """The s largest diagonal elements over λmax."""
    return float(hessian.diagonal.topk(s).values.sum()) / hessian.top


def largest_bernoulli(hessian: Hessian, s: int) -> float:
    """intdim(H): a Bernoulli mask can keep every coordinate."""
    return hessian.intdim


def largest_block_sparse(hessian: Hessian, s: int) -> float:
    """The largest ρ of any block."""
    return float(block_values(hessian, s).max())


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """A distribution of M: how ρ is drawn, its mean and variance, and the largest value it can take."""

    name: str
    draw: Callable[[Hessian, int, int, torch.Generator], Tensor]
    moments: Callable[[Hessian, int], Moments]
    largest: Callable[[Hessian, int], float]

    def sample(self, hessian: Hessian, s: int, draws: int, seed: int = 0) -> Tensor:
        """``draws`` values of ρ, (draws,), fp64."""
        if draws < 1:
            raise ZeroBlockError(f"draws must be at least 1, got {draws}")
        return self.draw(hessian, s, draws, torch.Generator().manual_seed(seed))


ENSEMBLES = {
    e.name: e
    for e in (
        Ensemble("low-rank", draw_low_rank, moments_low_rank, largest_low_rank),
        Ensemble("sparse", draw_exact, moments_exact, largest_exact),
        Ensemble("sparse (Bernoulli)", draw_bernoulli, moments_bernoulli, largest_bernoulli),
        Ensemble("block-sparse", draw_block_sparse, moments_block_sparse, largest_block_sparse),
    )
}
"""Definition 3.5 writes the sparse mask as Bernoulli; the paper's experiments keep exactly s coordinates."""
