"""Subspaces: where in a block the directions are drawn.

A subspace is a family of bases, one per tensor and turn; see ``basis`` for what a basis is.
"""

from __future__ import annotations

import abc
import dataclasses
import math

import torch
from torch import Tensor

from .basis import CHUNK, Basis, Elementwise, Factored, Site
from .errors import ZeroBlockError
from .noise import BASIS, Key, RandomMask, SmallMask
from .registry import Registry
from .shard import local, summed, whole

SUBSPACES = Registry("subspace")


class Subspace(abc.ABC):
    """A family of bases; every turn draws new ones."""

    @property
    def fixed(self) -> bool:
        """Whether a tensor's basis is the same in every turn, so that it need not be made again."""
        return False

    @property
    def folds(self) -> bool:
        """Whether its steps can be held in coordinates and folded into the weights later."""
        return False

    @property
    def retraces(self) -> bool:
        """Whether subtracting a perturbation undoes adding it, in exact arithmetic."""
        return True

    def initial(self, param: Tensor) -> float | None:
        """A number that bases need of the weights before training; None, the default, for none."""
        return None

    @abc.abstractmethod
    def basis(self, param: Tensor, key: Key, site: Site) -> Basis:
        """P for one tensor.

        Args:
            param: the tensor; only its shape, dtype and device may be used.
            key: addresses the first step of the turn.
            site: where the tensor lies, and how it is stored.
        """


@SUBSPACES.register
@dataclasses.dataclass(frozen=True)
class Full(Subspace):
    """The whole block: P is the identity."""

    fixed = True

    def basis(self, param: Tensor, key: Key, site: Site) -> Basis:
        return Elementwise(param.numel(), site)


@SUBSPACES.register
@dataclasses.dataclass(frozen=True)
class LowRank(Subspace):
    """U Vᵀ of rank r for matrices, dense for vectors (LOZO); V is held for a turn, without a factor 1/r.

    Args:
        rank: r, cut to the smaller side of a matrix.
        as_published: LOZO's code draws another U for the update on the steps that draw V.
    """

    rank: int = 2
    as_published: bool = False

    folds = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ZeroBlockError(f"LowRank: rank must be at least 1, got {self.rank}")

    @property
    def retraces(self) -> bool:
        return not self.as_published

    def basis(self, param: Tensor, key: Key, site: Site) -> Basis:
        if param.dim() < 2 or param.numel() == 0:
            return Elementwise(param.numel(), site)
        m, n = param.shape[0], param.numel() // param.shape[0]
        return Factored((m, n), min(self.rank, m, n), key, site, self.as_published)


@SUBSPACES.register
@dataclasses.dataclass(frozen=True)
class Sparse(Subspace):
    """The fraction ``keep`` of smallest magnitudes of each tensor (SparseMeZO).

    The threshold is the keep-quantile of the magnitudes before training; the mask is
    computed from the weights at every use and costs no memory.
    """

    keep: float = 0.75

    retraces = False  # the mask of the moved weights is another one

    def __post_init__(self) -> None:
        _check_fraction(self)

    def initial(self, param: Tensor) -> float:
        return smallest(param, max(1, round(self.keep * param.numel())))

    def basis(self, param: Tensor, key: Key, site: Site) -> Basis:
        assert site.initial is not None
        return Elementwise(param.numel(), site, None if self.keep == 1 else SmallMask(site.initial))


@SUBSPACES.register
@dataclasses.dataclass(frozen=True)
class Bernoulli(Subspace):
    """Each weight with probability ``keep``, redrawn each turn."""

    keep: float = 0.25

    def __post_init__(self) -> None:
        _check_fraction(self)

    def basis(self, param: Tensor, key: Key, site: Site) -> Basis:
        limit = math.ceil(self.keep * 2**32) - 1
        mask = None if self.keep == 1 else RandomMask(key.to(stream=BASIS), limit)
        return Elementwise(param.numel(), site, mask)


def _check_fraction(subspace: Sparse | Bernoulli) -> None:
    if not 0 < subspace.keep <= 1:
        raise ZeroBlockError(f"{type(subspace).__name__}: keep must be in (0, 1], got {subspace.keep}")


def smallest(param: Tensor, k: int) -> float:
    """The k-th smallest magnitude of a tensor, exactly, by counting bit patterns in two rounds; 0 of none.

    Magnitudes sort like the integers of their bits, so this takes two histograms of
    at most 65,536 bins instead of a sort, whatever the tensor's size.  Processes that hold
    the shards of a tensor add up their histograms, and nothing else.
    """
    if not param.numel():
        return 0.0
    if param.dtype == torch.float64:
        return float(whole(param).reshape(-1).abs().kthvalue(k).values)
    flat = local(param).detach().reshape(-1)
    word, half = (torch.int32, 16) if flat.dtype == torch.float32 else (torch.int16, 0)
    high = torch.zeros(1 << 15, dtype=torch.int64, device=flat.device)
    mask = 0x7FFFFFFF if half else 0x7FFF
    for part in flat.split(CHUNK):
        high += torch.bincount((part.view(word) & mask).to(torch.int64) >> half, minlength=1 << 15)
    cumulative = summed(high, param).cumsum(0)
    top = int(torch.searchsorted(cumulative, k))
    if not half:
        return float(torch.tensor([top], dtype=torch.int16).view(flat.dtype).double())
    rest = k - (int(cumulative[top - 1]) if top else 0)
    low = torch.zeros(1 << 16, dtype=torch.int64, device=flat.device)
    for part in flat.split(CHUNK):
        pattern = part.view(word) & mask
        low += torch.bincount(pattern[pattern >> half == top].to(torch.int64) & 0xFFFF, minlength=1 << 16)
    bottom = int(torch.searchsorted(summed(low, param).cumsum(0), rest))
    return float(torch.tensor([top << 16 | bottom], dtype=torch.int32).view(torch.float32).double())
