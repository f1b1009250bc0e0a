"""Bases: the linear map P of one tensor, which lifts coordinates z into the tensor's space.

A basis is applied, never materialised: noise is drawn inside the kernels, a low-rank
product is formed row by row, and a mask is computed when it is needed.

A new basis needs ``size``, ``coords`` and ``lift_``; everything else has a
default.  The other methods tell the faster paths whether a step can run on the device
alone, be held in coordinates, be measured next to a matrix product, or be replayed
together with others.  The defaults say no, so a new basis is never run
on a path that would get it wrong.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ZeroBlockError
from ..noise import Distribution, Draw, Key, Rounding
from ..shard import Box

CHUNK = 1 << 22
"""The number of coordinates (or lifted elements) to materialise at a time: 16 MiB in fp32."""

Alphas = Sequence[float] | Tensor
"""Coefficients, one per probe; a tensor holds them on the device, in fp32."""


Initial = float | tuple[Any, ...] | None
"""The numbers that a subspace reads off a tensor before training."""


@dataclasses.dataclass(frozen=True)
class Site:
    """A tensor's place among the weights, and the way its values are drawn and stored.

    Args:
        offset: global offset of the tensor's first element, which addresses its noise.
        distribution: the distribution of the coordinates.
        rounding: the rounding of 16-bit weights.
        initial: the numbers that :meth:`Subspace.initial` read off the weights before training, if any.
    """

    offset: int
    distribution: Distribution = Distribution.NORMAL
    rounding: Rounding = Rounding.STOCHASTIC
    initial: Initial = None


class Basis(abc.ABC):
    """P for one tensor of m·n elements, with ``size`` coordinates, flat and in fp32.

    Arguments that its methods share:
        param: the tensor.
        key: address of the coordinates z; probe k draws its coordinates at ``key.probe + k``.
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
        """How results are rounded to 16-bit weights."""
        return Rounding.STOCHASTIC

    @property
    def scale(self) -> float:
        """The factor on P, which a kernel that draws from ``elementwise`` has to apply itself."""
        return 1.0

    @property
    def spread(self) -> float:
        """Root mean square of the elements of Pz that move, for z of unit variance."""
        return 1.0

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

    def matrix(self, param: Tensor) -> tuple[int, int] | None:
        """The shape in which a rule may see all coordinates as one matrix; None if they do not form one."""
        return None

    def spans(self) -> Iterator[slice]:
        """Pieces of the coordinates small enough to materialise one after another."""
        yield slice(0, self.size)

    def perturbed(self, param: Tensor, key: Key, eps: float) -> Tensor:
        """A copy θ + eps·Pz; ``param`` is only read."""
        copy = param.detach().clone(memory_format=torch.contiguous_format)
        bits = key.to(probe=key.probe + 1)  # not the rounding bits of the update
        for span in self.spans():
            self.lift_(copy, self.coords(param, key, span), span, eps, bits, 1.0)
        return copy

    def copied_bytes(self, param: Tensor) -> int:
        """Bytes of the copy that ``perturbed`` makes."""
        return param.nbytes

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

    @property
    def uncut(self) -> Basis | None:
        """The basis of the whole tensor that this one was cut from; itself if it was not cut, None if that is lost."""
        return self

    def cut(self, box: Box) -> Basis:
        """The basis of a part of the tensor: the coordinates and rows of P that concern it.

        The methods of the result take the tensors and spans of the part.
        """
        raise ZeroBlockError(
            f"{type(self).__name__} does not say which part of its directions a shard takes: keep the weights whole on "
            "every process, or take the subspace Full, LowRank, Sparse or Bernoulli"
        )

    def clocked(self, clock: Tensor) -> Basis:
        """This basis with its own draws addressed by a clock on the device; only called on capturable bases."""
        return self

    def memory(self) -> tuple[object, ...]:
        """Addresses of tensors and values of numbers that a captured step of this basis would hold on to."""
        return ()

    def probed(self, key: Key) -> Basis:
        """This basis with the factor of the probe at ``key``, if every probe has its own factor; otherwise itself."""
        return self

    def factor(self, device: torch.device, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        """scale·V, (n, r); only called on bases with a ``factor_shape``."""
        raise TypeError(f"{type(self).__name__} has no factors")

    def coordinates_(self, out: Tensor, key: Key, scale: float, share: float = 1.0) -> Tensor:
        """out ← share·(B + scale·U), (m, r) of any dtype; only called on bases with a ``factor_shape``."""
        raise TypeError(f"{type(self).__name__} has no factors")

    def holding(self, held: Tensor | None) -> Basis:
        """This basis with steps held in ``held`` instead of written to the tensor; itself if it cannot hold steps."""
        return self

    def empty(self, device: torch.device) -> Tensor | None:
        """A tensor of zeros that can hold steps; None if P has no small form."""
        return None

    def fold_(self, param: Tensor, key: Key) -> None:
        """Write the held steps to the tensor; ``key`` addresses the rounding bits."""
        raise TypeError(f"{type(self).__name__} holds no steps")
