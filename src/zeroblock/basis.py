"""Bases: the linear map P of one tensor, which lifts coordinates z into the tensor's space.

A basis is applied, never materialised: noise is drawn inside the kernels, a low-rank
product row by row, a mask as it is needed.

A new basis needs ``size``, ``coords`` and ``lift_``; everything else has a
default.  Further methods answer the questions of the faster paths: whether a step
can run on the device alone, be held in coordinates, be measured beside a matrix product,
or be replayed together with others.  The defaults say no, so a new basis is never run
on a path that would get it wrong.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from . import ops
from .errors import ZeroBlockError
from .noise import BASIS, Distribution, Draw, Key, Mask, RandomMask, Rounding, SmallMask

CHUNK = 1 << 22
"""Coordinates (or lifted elements) that are materialised at a time, in fp32: 16 MiB."""

Alphas = Sequence[float] | Tensor
"""Coefficients, one per probe; a tensor holds them on the device, in fp32."""


@dataclasses.dataclass(frozen=True)
class Site:
    """Where a tensor lies among the weights, and how its values are drawn and stored.

    Args:
        offset: global offset of the tensor's first element, which addresses its noise.
        distribution: of the coordinates.
        rounding: of 16-bit weights.
        initial: the number that :meth:`Subspace.initial` read off the weights before training, if any.
    """

    offset: int
    distribution: Distribution = Distribution.NORMAL
    rounding: Rounding = Rounding.STOCHASTIC
    initial: float | None = None


class Basis(abc.ABC):
    """P for one tensor of m·n elements, with ``size`` coordinates, flat and in fp32.

    Arguments that its methods share:
        param: the tensor.
        key: address of the coordinates z; those of probe k are at ``key.probe + k``.
        span: a piece of the coordinates.
        alphas: one coefficient per probe.
        decay: factor on the weights, 1 - lr·λ.
    """

    @property
    def capturable(self) -> bool:
        """Whether ``add_`` takes coefficients that stay on the device, and every draw follows ``clocked``: then a step
        can be submitted without waiting for it, and captured as a CUDA graph."""
        return False

    @property
    def carries(self) -> bool:
        """Whether ``transport`` says how a rule's state moves from the last turn's basis to this one."""
        return False

    @property
    def pairs(self) -> bool:
        """Whether ``mirrored`` makes both copies from one draw."""
        return False

    @property
    def behind(self) -> bool:
        """Whether steps are held in coordinates, so that the tensor itself need not be θ."""
        return False

    @property
    def replays_together(self) -> bool:
        """Whether ``ops.replay`` has a kernel that takes many SGD steps in this basis at once."""
        return False

    @property
    def rounding(self) -> Rounding:
        """How results become 16-bit weights."""
        return Rounding.STOCHASTIC

    @property
    def factor_shape(self) -> tuple[int, int] | None:
        """(n, r) where Pz is a product of two thin matrices, ``coordinates_`` of (m, r) and ``factor`` of (n, r), that
        can be applied one after the other; None for other bases."""
        return None

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Number of coordinates."""

    @abc.abstractmethod
    def coords(self, param: Tensor, key: Key, span: slice) -> Tensor:
        """z on a span, in fp32: a tensor that the caller may overwrite."""

    @abc.abstractmethod
    def lift_(self, param: Tensor, delta: Tensor, span: slice, alpha: float, key: Key, decay: float) -> None:
        """θ ← decay·θ + alpha·Pδ, with δ given on a span; ``key`` addresses the rounding bits."""

    def spans(self) -> Iterator[slice]:
        """Pieces of the coordinates small enough to materialise one after another."""
        yield slice(0, self.size)

    def perturbed(self, param: Tensor, key: Key, eps: float) -> Tensor:
        """A copy θ + eps·Pz; ``param`` is only read."""
        copy = param.detach().clone(memory_format=torch.contiguous_format)
        bits = key.to(probe=key.probe + 1)  # other rounding bits than those of the update
        for span in self.spans():
            self.lift_(copy, self.coords(param, key, span), span, eps, bits, 1.0)
        return copy

    def mirrored(self, param: Tensor, key: Key, eps: float) -> tuple[Tensor, Tensor]:
        """The copies at eps and at -eps."""
        return self.perturbed(param, key, eps), self.perturbed(param, key, -eps)

    def add_(self, param: Tensor, key: Key, alphas: Alphas, decay: float) -> None:
        """θ ← decay·θ + P Σₖ alphas[k]·z_k."""
        if decay == 1.0 and not any(alphas):
            return
        for span in self.spans():
            self.lift_(param, self.combined(param, key, alphas, span), span, 1.0, key, decay)

    def combined(self, param: Tensor, key: Key, alphas: Alphas, span: slice) -> Tensor:
        """Σₖ alphas[k]·z_k on a span, in fp32."""
        g = self.coords(param, key, span).mul_(alphas[0])
        for probe in range(1, len(alphas)):
            g.add_(self.coords(param, key.to(probe=key.probe + probe), span), alpha=float(alphas[probe]))
        return g

    def transport(self, state: Tensor, old: Basis) -> Tensor:
        """Coordinates in the basis of an earlier turn, expressed in this one."""
        raise ZeroBlockError(f"{type(self).__name__} cannot carry a rule's state from one turn to the next")

    def elementwise(self, key: Key) -> Draw | None:
        """The noise whose elements are the coordinates one by one; None where P is not diagonal."""
        return None

    def clocked(self, clock: Tensor) -> Basis:
        """This basis with its own draws addressed by a clock on the device; asked of capturable bases only."""
        return self

    def memory(self) -> tuple[object, ...]:
        """Addresses of tensors and values of numbers that a captured step of this basis would hold on to."""
        return ()

    def factor(self, device: torch.device, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        """scale·V, (n, r); asked of bases with a ``factor_shape`` only."""
        raise TypeError(f"{type(self).__name__} has no factors")

    def coordinates_(self, out: Tensor, key: Key, scale: float, share: float = 1.0) -> Tensor:
        """out ← share·(B + scale·U), (m, r) of any dtype; asked of bases with a ``factor_shape`` only."""
        raise TypeError(f"{type(self).__name__} has no factors")

    def holding(self, held: Tensor | None) -> Basis:
        """This basis with steps held in ``held`` instead of written to the tensor; itself where none can be held."""
        return self

    def empty(self, device: torch.device) -> Tensor | None:
        """Zeros in which steps can be held; None where P has no small form."""
        return None

    def fold_(self, param: Tensor, key: Key) -> None:
        """Write the held steps to the tensor; ``key`` addresses the rounding bits."""
        raise TypeError(f"{type(self).__name__} holds no steps")


@dataclasses.dataclass(frozen=True)
class Elementwise(Basis):
    """P is the identity, or a diagonal 0/1 matrix: ``mask`` says which coordinates exist.

    Args:
        numel: elements of the tensor.
        site: where the tensor lies.
        mask: which elements take noise; all by default.
    """

    numel: int
    site: Site
    mask: Mask | None = None

    capturable = carries = pairs = replays_together = True

    @property
    def size(self) -> int:
        return self.numel

    @property
    def rounding(self) -> Rounding:
        return self.site.rounding

    def elementwise(self, key: Key) -> Draw:
        return Draw(key, self.site.offset, self.site.distribution, self.mask)

    def perturbed(self, param: Tensor, key: Key, eps: float) -> Tensor:
        return ops.perturb(param, self.elementwise(key), eps, rounding=self.rounding)

    def mirrored(self, param: Tensor, key: Key, eps: float) -> tuple[Tensor, Tensor]:
        return ops.perturb_pair(param, self.elementwise(key), eps, rounding=self.rounding)

    def add_(self, param: Tensor, key: Key, alphas: Alphas, decay: float) -> None:
        ops.add_noise_(param, self.elementwise(key), alphas, decay=decay, rounding=self.rounding)

    def spans(self) -> Iterator[slice]:
        for start in range(0, self.numel, CHUNK):
            yield slice(start, min(start + CHUNK, self.numel))

    def coords(self, param: Tensor, key: Key, span: slice) -> Tensor:
        flat, draw = _flat(param)[span], self.elementwise(key).at(span.start)
        z = torch.zeros(flat.shape, dtype=torch.float32, device=param.device)
        if isinstance(self.mask, SmallMask):  # it looks at the weights, and z holds none
            return ops.fill_(z, draw.to(mask=None)).mul_(flat.abs() <= self.mask.threshold)
        return ops.add_noise_(z, draw, 1.0)

    def lift_(self, param: Tensor, delta: Tensor, span: slice, alpha: float, key: Key, decay: float) -> None:
        flat = _flat(param)
        draw = self.elementwise(key).at(span.start)
        ops.add_(flat[span], delta, alpha, draw, decay=decay, rounding=self.rounding)
        if flat.data_ptr() != param.data_ptr():  # a strided tensor was copied
            param.detach().copy_(flat.view(param.shape))

    def transport(self, state: Tensor, old: Basis) -> Tensor:
        return state

    def clocked(self, clock: Tensor) -> Elementwise:
        if not isinstance(self.mask, RandomMask):
            return self
        return dataclasses.replace(self, mask=RandomMask(self.mask.key.to(clock=clock), self.mask.limit))

    def memory(self) -> tuple[object, ...]:
        return (self.site.initial,)


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


def _flat(param: Tensor) -> Tensor:
    return param.detach().reshape(-1)
