"""Subspaces: the linear map P that lifts coordinates z into a tensor's space.

A basis is P for one tensor.  It is applied, never materialised: noise is drawn
inside the kernels, a low-rank product row by row, a mask as it is needed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from . import ops
from .errors import ZeroBlockError
from .noise import BASIS, Distribution, Draw, Key, Mask, RandomMask, Rounding, SmallMask
from .rule import Adam

CHUNK = 1 << 22
"""Coordinates (or lifted elements) that are materialised at a time, in fp32: 16 MiB."""


Alphas = Sequence[float] | Tensor
"""Coefficients, one a probe; a tensor is one of a GPU, in fp32."""


class Basis(Protocol):
    """P for one tensor with ``size`` coordinates, flat and in fp32.

    Args of its methods:
        param: the tensor, of m·n elements.
        key: address of the coordinates z; probe k's are those of ``key.probe + k``.
    """

    @property
    def size(self) -> int: ...

    def perturbed(self, param: Tensor, key: Key, eps: float, rounding: Rounding) -> Tensor:
        """A copy θ + eps·Pz; ``param`` is only read."""
        ...

    def add_(self, param: Tensor, key: Key, alphas: Alphas, decay: float, rounding: Rounding) -> None:
        """θ ← decay·θ + P Σₖ alphas[k]·z_k, in one pass."""
        ...

    def spans(self) -> Iterator[slice]:
        """Pieces of the coordinates small enough to materialise one after another."""
        ...

    def coords(self, param: Tensor, key: Key, span: slice) -> Tensor:
        """z on a span."""
        ...

    def lift_(
        self, param: Tensor, delta: Tensor, span: slice, alpha: float, key: Key, decay: float, rounding: Rounding
    ) -> None:
        """θ ← decay·θ + alpha·Pδ, δ given on a span."""
        ...

    def transport(self, state: Tensor, old: Basis) -> Tensor:
        """Coordinates in an older basis, in this one."""
        ...


class Subspace(Protocol):
    """A family of bases; a new one is drawn each turn."""

    def threshold(self, param: Tensor) -> float | None:
        """What a basis must remember of the initial weights, if anything."""
        ...

    def basis(self, param: Tensor, key: Key, offset: int, threshold: float | None, distribution: Distribution) -> Basis:
        """P for one tensor; ``key`` addresses the first step of the turn, ``offset`` the tensor's first element."""
        ...


@dataclasses.dataclass(frozen=True)
class Elementwise:
    """P is the identity, or a diagonal 0/1 matrix: ``mask`` says which coordinates exist."""

    size: int
    offset: int
    distribution: Distribution = Distribution.NORMAL
    mask: Mask | None = None

    def _at(self, key: Key) -> Draw:
        return Draw(key, self.offset, self.distribution, self.mask)

    def perturbed(self, param: Tensor, key: Key, eps: float, rounding: Rounding) -> Tensor:
        return ops.perturb(param, self._at(key), eps, rounding=rounding)

    def mirrored(self, param: Tensor, key: Key, eps: float, rounding: Rounding) -> tuple[Tensor, Tensor]:
        """The copies at eps and at -eps, from one draw."""
        return ops.perturb_pair(param, self._at(key), eps, rounding=rounding)

    def add_(self, param: Tensor, key: Key, alphas: Alphas, decay: float, rounding: Rounding) -> None:
        ops.add_noise_(param, self._at(key), alphas, decay=decay, rounding=rounding)

    def adam_(
        self,
        param: Tensor,
        state: dict[str, Any],
        key: Key,
        scalars: Alphas,
        rule: Adam,
        decay: float,
        rounding: Rounding,
    ) -> None:
        """Adam's step in one pass over weights and moments; see ``ops.adam_`` for the scalars."""
        ops.adam_(
            param, state["m"], state["v"], self._at(key), scalars, betas=rule.betas, eps=rule.eps, decay=decay,
            rounding=rounding,
        )  # fmt: skip

    def spans(self) -> Iterator[slice]:
        for start in range(0, self.size, CHUNK):
            yield slice(start, min(start + CHUNK, self.size))

    def coords(self, param: Tensor, key: Key, span: slice) -> Tensor:
        flat = _flat(param)[span]
        z = torch.zeros(flat.shape, dtype=torch.float32, device=param.device)
        draw = self._at(key).at(span.start)
        if isinstance(self.mask, SmallMask):
            return ops.fill_(z, draw.to(mask=None)).mul_(flat.abs() <= self.mask.threshold)
        return ops.add_noise_(z, draw, 1.0)

    def lift_(
        self, param: Tensor, delta: Tensor, span: slice, alpha: float, key: Key, decay: float, rounding: Rounding
    ) -> None:
        flat = _flat(param)
        piece = flat[span]
        ops.add_(piece, delta, alpha, self._at(key).at(span.start), decay=decay, rounding=rounding)
        if flat.data_ptr() != param.data_ptr():  # a strided tensor was copied
            param.detach().copy_(flat.view(param.shape))

    def transport(self, state: Tensor, old: Basis) -> Tensor:
        return state


@dataclasses.dataclass(frozen=True)
class Factored:
    """Pz = z Vᵀ with z of m×r and V of n×r, drawn anew each turn; m×n is the tensor as a matrix.

    ``stale`` reproduces a bug of LOZO's code: on the step that draws V the update
    uses another U than the measurement did.

    With ``held``, B of m×r in fp32, steps move B and not the tensor W, which they would have to
    write whole: θ is W + B Vᵀ until :meth:`fold_` makes it W again.
    """

    shape: tuple[int, int]
    rank: int
    key: Key
    offset: int
    distribution: Distribution = Distribution.NORMAL
    stale: bool = False
    held: Tensor | None = dataclasses.field(default=None, compare=False)

    @property
    def size(self) -> int:
        return self.shape[0] * self.rank

    def factor(self, device: torch.device, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        """scale·V, (n, r), regenerated."""
        out = torch.empty((self.shape[1], self.rank), dtype=dtype, device=device)
        return self.draw_(out, self.key.to(stream=BASIS), scale)

    def draw(self, key: Key, device: torch.device) -> Tensor:
        """U, (m, r)."""
        return self.draw_(self._empty(device), key, 1.0)

    def _empty(self, device: torch.device) -> Tensor:
        """(m, r) fp32, whatever torch's default."""
        return torch.empty((self.shape[0], self.rank), dtype=torch.float32, device=device)

    def draw_(self, out: Tensor, key: Key, alpha: ops.Alpha) -> Tensor:
        """out ← Σₖ alpha[k]·U_k; out is (m, r) of any dtype, and only written."""
        return ops.fill_(out, self._at(key), alpha)

    def _at(self, key: Key) -> Draw:
        return Draw(key, self.offset, self.distribution)

    def coordinates_(self, out: Tensor, key: Key, scale: float, share: float = 1.0) -> Tensor:
        """out ← share·(B + scale·U), what lies between W and θ + scale·Pz; out is (m, r) of any dtype."""
        return ops.fill_(out, self._at(key), share * scale, start=self.held, decay=share)

    def perturbed(self, param: Tensor, key: Key, eps: float, rounding: Rounding) -> Tensor:
        copy = param.detach().clone(memory_format=torch.contiguous_format)
        bits = key.to(probe=key.probe + 1)  # apart from the update's, which are those of probe 0
        z, v = self.coordinates_(self._empty(param.device), key, eps), self.factor(param.device)
        return ops.add_outer_(copy, z, v, 1.0, self._at(bits), rounding=rounding, flip=eps < 0)

    def add_(self, param: Tensor, key: Key, alphas: Alphas, decay: float, rounding: Rounding) -> None:
        if decay == 1.0 and not isinstance(alphas, Tensor) and not any(alphas):
            return
        if self.held is not None:
            ops.add_noise_(self.held, self._at(self._update_key(key)), alphas)
            return
        z = self.draw_(self._empty(param.device), self._update_key(key), alphas)
        self._lift_(param, z, 1.0, key, decay, rounding)

    def fold_(self, param: Tensor, key: Key, rounding: Rounding) -> None:
        """W ← W + B Vᵀ, B ← 0; ``key`` addresses the rounding bits."""
        assert self.held is not None
        self._lift_(param, self.held, 1.0, key, 1.0, rounding)
        self.held.zero_()

    def _lift_(self, param: Tensor, z: Tensor, alpha: float, key: Key, decay: float, rounding: Rounding) -> None:
        v = self.factor(param.device)
        ops.add_outer_(param, z, v, alpha, self._at(key), decay=decay, rounding=rounding)

    def _update_key(self, key: Key) -> Key:
        """Where the update draws U: the measurement's place, or as published on the steps that draw V."""
        return key.to(stream=BASIS, probe=key.probe + 1) if self.stale and key.step == self.key.step else key

    def spans(self) -> Iterator[slice]:
        yield slice(0, self.size)

    def coords(self, param: Tensor, key: Key, span: slice) -> Tensor:
        return self.draw(self._update_key(key), param.device).view(-1)[span]

    def lift_(
        self, param: Tensor, delta: Tensor, span: slice, alpha: float, key: Key, decay: float, rounding: Rounding
    ) -> None:
        z = delta.view(self.shape[0], self.rank)
        if self.held is not None:
            self.held.add_(z, alpha=alpha)
            return
        self._lift_(param, z, alpha, key, decay, rounding)

    def transport(self, state: Tensor, old: Basis) -> Tensor:
        assert isinstance(old, Factored)
        overlap = old.factor(state.device).T @ self.factor(state.device) / self.shape[1]
        return (state.view(self.shape[0], self.rank) @ overlap).view(-1)


@dataclasses.dataclass(frozen=True)
class Full:
    """The whole block: P is the identity."""

    def threshold(self, param: Tensor) -> None:
        return None

    def basis(self, param: Tensor, key: Key, offset: int, threshold: float | None, distribution: Distribution) -> Basis:
        return Elementwise(param.numel(), offset, distribution)


@dataclasses.dataclass(frozen=True)
class LowRank:
    """U Vᵀ of rank r for matrices, dense for vectors (LOZO); V is held for a turn, no 1/r scaling.

    Args:
        rank: r, cut to the smaller side of a matrix.
        as_published: LOZO's code draws another U for the update on the steps that draw V.
    """

    rank: int = 2
    as_published: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ZeroBlockError(f"LowRank: rank must be at least 1, got {self.rank}")

    def threshold(self, param: Tensor) -> None:
        return None

    def basis(self, param: Tensor, key: Key, offset: int, threshold: float | None, distribution: Distribution) -> Basis:
        if param.dim() < 2 or param.numel() == 0:
            return Elementwise(param.numel(), offset, distribution)
        m, n = param.shape[0], param.numel() // param.shape[0]
        return Factored((m, n), min(self.rank, m, n), key, offset, distribution, self.as_published)


@dataclasses.dataclass(frozen=True)
class Sparse:
    """The fraction ``keep`` of smallest magnitudes of each tensor (SparseMeZO).

    The threshold is the keep-quantile of the magnitudes before training; the mask is
    taken anew from the weights at every use and costs no memory.
    """

    keep: float = 0.75

    def __post_init__(self) -> None:
        _check_fraction(self)

    def threshold(self, param: Tensor) -> float:
        return smallest(param, max(1, round(self.keep * param.numel())))

    def basis(self, param: Tensor, key: Key, offset: int, threshold: float | None, distribution: Distribution) -> Basis:
        assert threshold is not None
        mask = None if self.keep == 1 else SmallMask(threshold)
        return Elementwise(param.numel(), offset, distribution, mask)


@dataclasses.dataclass(frozen=True)
class Bernoulli:
    """Each weight with probability ``keep``, redrawn each turn."""

    keep: float = 0.25

    def __post_init__(self) -> None:
        _check_fraction(self)

    def threshold(self, param: Tensor) -> None:
        return None

    def basis(self, param: Tensor, key: Key, offset: int, threshold: float | None, distribution: Distribution) -> Basis:
        limit = math.ceil(self.keep * 2**32) - 1
        mask = None if self.keep == 1 else RandomMask(key.to(stream=BASIS), limit)
        return Elementwise(param.numel(), offset, distribution, mask)


def _check_fraction(subspace: Sparse | Bernoulli) -> None:
    if not 0 < subspace.keep <= 1:
        raise ZeroBlockError(f"{type(subspace).__name__}: keep must be in (0, 1], got {subspace.keep}")


def _flat(param: Tensor) -> Tensor:
    return param.detach().reshape(-1)


def smallest(param: Tensor, k: int) -> float:
    """The k-th smallest magnitude of a tensor, exactly, by counting bit patterns in two rounds; 0 of none.

    Magnitudes sort like the integers of their bits, so this takes two histograms of
    at most 65,536 bins instead of a sort, whatever the tensor's size.
    """
    flat = _flat(param)
    if not flat.numel():
        return 0.0
    if flat.dtype == torch.float64:
        return float(flat.abs().kthvalue(k).values)
    word, half = (torch.int32, 16) if flat.dtype == torch.float32 else (torch.int16, 0)
    high = torch.zeros(1 << 15, dtype=torch.int64, device=flat.device)
    mask = 0x7FFFFFFF if half else 0x7FFF
    for part in flat.split(CHUNK):
        high += torch.bincount((part.view(word) & mask).to(torch.int64) >> half, minlength=1 << 15)
    cumulative = high.cumsum(0)
    top = int(torch.searchsorted(cumulative, k))
    if not half:
        return float(torch.tensor([top], dtype=torch.int16).view(flat.dtype).double())
    rest = k - (int(cumulative[top - 1]) if top else 0)
    low = torch.zeros(1 << 16, dtype=torch.int64, device=flat.device)
    for part in flat.split(CHUNK):
        pattern = part.view(word) & mask
        low += torch.bincount(pattern[pattern >> half == top].to(torch.int64) & 0xFFFF, minlength=1 << 16)
    bottom = int(torch.searchsorted(low.cumsum(0), rest))
    return float(torch.tensor([top << 16 | bottom], dtype=torch.int32).view(torch.float32).double())
