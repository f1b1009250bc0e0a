"""Subspaces: the parts of a block's space that directions are drawn in.

A subspace is a family of bases, one per tensor and turn; see ``basis`` for what a basis is.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import re

from torch import Tensor

from .basis import Basis, Elementwise, Factored, Framed, Initial, OuterProduct, Scaled, Site
from .errors import ZeroBlockError
from .noise import BASIS, Key, RandomMask, SmallMask
from .quantise import Scales
from .registry import Registry
from .shard import whole
from .size import rounded, smallest, typical_size

SUBSPACES = Registry("subspace")


class Subspace(abc.ABC):
    """A family of bases; every turn draws new ones."""

    @property
    def fixed(self) -> bool:
        """Whether a tensor's basis is the same in every turn, so that it need not be made again."""
        return False

    relative = False
    """Whether its directions are in units of the weights."""

    @property
    def folds(self) -> bool:
        """Whether its steps can be held in coordinates and folded into the weights later."""
        return False

    @property
    def retraces(self) -> bool:
        """Whether subtracting a perturbation undoes adding it, in exact arithmetic."""
        return True

    product: float | None = None
    """Not None if :meth:`initial` needs the sizes that follow from other tensors, such as the size of LoRA's B."""

    def initial(self, param: Tensor, size: float | None = None) -> Initial:
        """Numbers that bases need from the weights before training; None, the default, if there are none.

        Args:
            param: the tensor.
            size: the size that follows from other tensors; only given if ``product`` asks for it and it is known.
        """
        return None

    def in_units(self, words: str) -> Subspace:
        """This subspace in the units of a run that began with other ones.

        Args:
            words: the subspace, as written in a journal or a state.

        Returns:
            The subspace in those units; unchanged if the words differ in more than the units.
        """
        return self

    @property
    def reads(self) -> bool:
        """Whether :meth:`initial` looks at the weights, which must then be on the device that uses them."""
        return type(self).initial is not Subspace.initial

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
        as_published: draw another U for the update on the steps that draw V, as LOZO's code does.
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
class Frames(Subspace):
    """U z Vᵀ with z of r×r between orthonormal frames (SubZero), or U z with z of r×n; dense for vectors.

    U of m×r and V of n×r are drawn anew each turn and held in fp32 while it lasts.

    Args:
        rank: r, cut to the smaller side of a matrix.
        both: whether there is a V; without it only the rows of a matrix are projected (ZO-Muon).
        scaled: multiply by √(m·n) over the root of the number of coordinates, so that steps are as long as in the
            full space and lr has the same meaning; without it ‖Pz‖ = ‖z‖.
    """

    rank: int = 64
    both: bool = True
    scaled: bool = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ZeroBlockError(f"Frames: rank must be at least 1, got {self.rank}")

    @property
    def folds(self) -> bool:
        return self.both

    def basis(self, param: Tensor, key: Key, site: Site) -> Basis:
        if param.dim() < 2 or param.numel() == 0:
            return Elementwise(param.numel(), site)
        m, n = param.shape[0], param.numel() // param.shape[0]
        rank = min(self.rank, m, n)
        gain = math.sqrt(m * n / (rank * (rank if self.both else n))) if self.scaled else 1.0
        return Framed((m, n), rank, self.both, gain, key, site, param.device)


@SUBSPACES.register
@dataclasses.dataclass(frozen=True)
class Sparse(Subspace):
    """The fraction ``keep`` of each tensor with the smallest magnitudes (SparseMeZO).

    The threshold is the keep-quantile of the magnitudes before training; the mask is
    computed from the weights at every use and costs no memory.
    """

    keep: float = 0.75

    retraces = False  # the moved weights have another mask

    def __post_init__(self) -> None:
        _check_fraction(self)

    def initial(self, param: Tensor, size: float | None = None) -> float:
        return smallest(param, max(1, round(self.keep * param.numel())))

    def basis(self, param: Tensor, key: Key, site: Site) -> Basis:
        assert isinstance(site.initial, float)
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


@SUBSPACES.register
@dataclasses.dataclass(frozen=True)
class Relative(Subspace):
    """Directions in units of the weights: P = diag(s)·Q for another subspace's Q, with s per tensor.

        s = max(size of the tensor before training, 1 / (4·√fan-in)) / rms of the elements of Qz

    Then eps and lr are pure numbers: a step of 0.01 moves every tensor by a hundredth of its own size,
    a bias of 77 as well as a matrix of 0.01.  The floor is for tensors that begin at or near zero: a quarter of
    the size that keeps a layer's outputs at unit variance.  With a quantile, the scales of integers have no floor:
    their usual size is a hundredth of a weight.

    LoRA's B begins at zero, too, but its own size tells nothing: the model sees the product (alpha/r)·BA.  The size of
    B is the one at which the product is as large as the matrix W that it is added to, or a multiple of that:

        s = max(rms(B), product·rms(W) / (alpha/r·√r·rms(A)))

    Then a step of 0.01 on B moves W by a hundredth of its size, times the multiple.

    The size of a matrix is the root mean square of its elements.  Norms and biases may have a few elements that
    are a hundred times as large as the others; their size can be a low quantile, so that a step is small
    compared with most of their elements.

    Args:
        subspace: the other subspace, which gives Q.
        quantile: the quantile of the elements' magnitudes that is the size of a vector; then the scales of integers
            have no floor. By default the size of a vector is its root mean square, too, and scales have the floor.
        product: the size of LoRA's product, in units of the matrix next to it, which determines the size of B; by
            default B has the floor.
    """

    subspace: Subspace = Full()
    quantile: float | None = dataclasses.field(default=None, metadata={"later": "journals until 2026-11-16 lack it"})
    product: float | None = dataclasses.field(default=None, metadata={"later": "journals until 2026-11-18 lack it"})

    relative = True

    def __repr__(self) -> str:
        """The words for journals; a quantile or product of None is left out, as in older journals."""
        given = {"quantile": self.quantile, "product": self.product}
        words = "".join(f", {name}={value}" for name, value in given.items() if value is not None)
        return f"Relative(subspace={self.subspace}{words})"

    @property
    def fixed(self) -> bool:
        return self.subspace.fixed

    @property
    def folds(self) -> bool:
        return self.subspace.folds

    @property
    def retraces(self) -> bool:
        return self.subspace.retraces

    def in_units(self, words: str) -> Subspace:
        found = WORDS.fullmatch(words)
        if found is None or found["subspace"] != f"{self.subspace}":
            return self
        quantile, product = (None if number is None else float(number) for number in found.group("quantile", "product"))
        return Relative(self.subspace, quantile, product)

    def __post_init__(self) -> None:
        if self.quantile is not None and not 0 < self.quantile <= 1:
            raise ZeroBlockError(f"a quantile is above 0 and at most 1, got {self.quantile}")
        if self.product is not None and not 0 < self.product < math.inf:
            raise ZeroBlockError(f"the size of a product is positive and finite, got {self.product}")

    def initial(self, param: Tensor, size: float | None = None) -> Initial:
        quantile = self.quantile if param.dim() <= 1 else None
        small = self.quantile is not None and isinstance(param, Scales)
        least = None if size is None or self.product is None else self.product * size
        return (typical_size(whole(param), quantile, small, least), self.subspace.initial(param))

    def basis(self, param: Tensor, key: Key, site: Site) -> Basis:
        assert isinstance(site.initial, tuple)
        size, initial = site.initial
        inner = self.subspace.basis(param, key, dataclasses.replace(site, initial=initial))
        return Scaled(inner, rounded(size / inner.spread))


NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
WORDS = re.compile(
    rf"Relative\(subspace=(?P<subspace>.+?)(?:, quantile=(?P<quantile>{NUMBER}))?(?:, product=(?P<product>{NUMBER}))?\)"
)
"""How :class:`Relative` is written in journals and states."""


def _check_fraction(subspace: Sparse | Bernoulli) -> None:
    if not 0 < subspace.keep <= 1:
        raise ZeroBlockError(f"{type(subspace).__name__}: keep must be in (0, 1], got {subspace.keep}")


@SUBSPACES.register
@dataclasses.dataclass(frozen=True)
class Outer(Subspace):
    """A Bᵀ/√r of rank r for matrices, dense for vectors (EGGROLL); every probe of every step draws both factors.

    The sum of many probes is a step of high rank, unlike :class:`LowRank`'s, which shares V for a turn.

    Args:
        rank: r, cut to the smaller side of a matrix.
    """

    rank: int = 1

    fixed = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ZeroBlockError(f"Outer: rank must be at least 1, got {self.rank}")

    def basis(self, param: Tensor, key: Key, site: Site) -> Basis:
        if param.dim() < 2 or param.numel() == 0:
            return Elementwise(param.numel(), site)
        m, n = param.shape[0], param.numel() // param.shape[0]
        return OuterProduct((m, n), min(self.rank, m, n), site)
