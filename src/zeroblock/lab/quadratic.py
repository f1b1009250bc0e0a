"""The random quadratic ½ θᵀHθ: a Hessian-like matrix with a chosen spectrum, and the module that holds θ."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..errors import ZeroBlockError

REFERENCES = (10, 40, 70, 100)
"""Eigenvalues of the heterogeneous blocks lie within ±2 of one of these."""


@dataclasses.dataclass(frozen=True)
class Hessian:
    """A block-diagonal positive semi-definite matrix, H = diag(Q₁Λ₁Q₁ᵀ, …, Q_BΛ_BQ_Bᵀ), never assembled.

    Args:
        blocks: (B, b, b), fp64.
        spectra: (B, b), the eigenvalues of each block.
        vectors: (B, b, b), the eigenvectors of each block in columns.
    """

    blocks: Tensor
    spectra: Tensor
    vectors: Tensor

    @property
    def dim(self) -> int:
        """d = B·b."""
        return self.spectra.numel()

    @functools.cached_property
    def top(self) -> float:
        """λmax(H)."""
        return float(self.spectra.max())

    @functools.cached_property
    def trace(self) -> float:
        """Tr(H)."""
        return float(self.spectra.sum())

    @property
    def intdim(self) -> float:
        """Tr(H) / λmax(H)."""
        return self.trace / self.top

    @property
    def rank(self) -> int:
        """Number of eigenvalues that are not zero."""
        return int((self.spectra > 0).sum())

    @functools.cached_property
    def diagonal(self) -> Tensor:
        """Hᵢᵢ, (d,)."""
        return self.blocks.diagonal(dim1=1, dim2=2).reshape(-1)

    def __matmul__(self, x: Tensor) -> Tensor:
        """H x for x of (d,) or (d, k)."""
        if len(self.blocks) == 1:
            return self.blocks[0] @ x
        columns = x.reshape(len(self.blocks), -1, x.numel() // self.dim)
        return torch.bmm(self.blocks, columns).view(x.shape)

    def range(self) -> Tensor:
        """An orthonormal basis of the range of H, its eigenvectors, (d, rank)."""
        vectors: Tensor = torch.block_diag(*self.vectors)
        return vectors[:, self.spectra.reshape(-1) > 0]


def hessian(dim: int = 256, rank: int = 64, tops: Sequence[float] = (10.0,), *, seed: int = 0) -> Hessian:
    """The paper's Hessian-like matrix: in each block ``rank`` eigenvalues that decay linearly to a tenth.

        Λᵢ = diag(λᵢ, …, 0.1·λᵢ, 0, …, 0)

    Args:
        dim: d.
        rank: r, the number of nonzero eigenvalues per block.
        tops: λᵢ, one per block; their number B divides d.
        seed: the seed of the eigenvectors.
    """
    b = _block_size(dim, rank, len(tops))
    spectra = torch.zeros(len(tops), b, dtype=torch.float64)
    for i, top in enumerate(tops):
        spectra[i, :rank] = torch.linspace(top, 0.1 * top, rank, dtype=torch.float64)
    return _rotated(spectra, torch.Generator().manual_seed(seed))


def heterogeneous(
    dim: int = 1024, rank: int = 16, blocks: int = 16, *, decay: bool = False, spread: int = 2, seed: int = 0
) -> Hessian:
    """Blocks with different spectra: each draws one of REFERENCES, and integers within ±spread of it.

    Args:
        dim: d.
        rank: nonzero eigenvalues per block; the paper says 64 in its text and 16 in its appendix.
        blocks: B; it divides d.
        decay: draw only the largest eigenvalue of a block and let the others fall linearly to a tenth of it.
        spread: the largest distance from the reference.
        seed: the seed of spectra and eigenvectors.
    """
    b = _block_size(dim, rank, blocks)
    generator = torch.Generator().manual_seed(seed)
    reference = torch.tensor(REFERENCES)[torch.randint(len(REFERENCES), (blocks, 1), generator=generator)]
    drawn = reference + torch.randint(-spread, spread + 1, (blocks, rank), generator=generator)
    spectra = torch.zeros(blocks, b, dtype=torch.float64)
    spectra[:, :rank] = drawn
    if decay:
        spectra[:, :rank] = drawn[:, :1] * torch.linspace(1, 0.1, rank, dtype=torch.float64)
    return _rotated(spectra, generator)


def _block_size(dim: int, rank: int, blocks: int) -> int:
    if blocks < 1 or dim % blocks:
        raise ZeroBlockError(f"{blocks} blocks do not divide a dimension of {dim}")
    if not 1 <= rank <= dim // blocks:
        raise ZeroBlockError(f"rank {rank} does not fit a block of {dim // blocks} coordinates")
    return dim // blocks


def _rotated(spectra: Tensor, generator: torch.Generator) -> Hessian:
    count, b = spectra.shape
    vectors = torch.linalg.qr(torch.randn(count, b, b, dtype=torch.float64, generator=generator)).Q
    blocks = vectors @ (spectra.unsqueeze(-1) * vectors.mT)
    return Hessian((blocks + blocks.mT) / 2, spectra, vectors)


class Quadratic(nn.Module):
    """½ θᵀHθ with θ cut into pieces of equal size, each a parameter; by default in one piece.

    Args:
        hessian: H.
        start: θ₀, (d,).
        size: coordinates per piece.
    """

    def __init__(self, hessian: Hessian, start: Tensor, size: int | None = None) -> None:
        super().__init__()
        if start.shape != (hessian.dim,):
            raise ZeroBlockError(f"θ₀ has shape {tuple(start.shape)}, the Hessian needs ({hessian.dim},)")
        if size is not None and hessian.dim % size:
            raise ZeroBlockError(f"pieces of {size} coordinates do not divide a dimension of {hessian.dim}")
        self.hessian = hessian
        pieces = start.detach().double().clone().split(size or hessian.dim)
        self.theta = nn.ParameterList([nn.Parameter(piece.clone()) for piece in pieces])
        self.pieces = tuple(self.theta)  # reading a ParameterList costs a tenth of a step

    def point(self) -> Tensor:
        """θ, (d,)."""
        return self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces)

    def forward(self) -> Tensor:
        theta = self.point()
        return torch.dot(theta, self.hessian @ theta) / 2
