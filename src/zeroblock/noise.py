"""Noise is a function of its address, never a stream.

    u[i] = f(seed, step, probe, stream, i)

where ``i`` is the global element offset: the position of a weight among all
weights of the model.  There is no draw order, so there is none to get wrong:
the noise of a block is the restriction of dense noise, a shard computes its own
slice, and replay stores no tensors.  ``docs/noise.md`` specifies ``f`` to the bit.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NOISE, BASIS, SCHEDULE, ROUNDING = range(4)
"""Streams: coordinates z, the basis P, block choices, stochastic rounding."""

VERSION = 1
"""Version of the function specified in ``docs/noise.md``."""


class Distribution(enum.IntEnum):
    """What the coordinates z are drawn from; both have mean 0 and variance 1."""

    NORMAL = 0
    RADEMACHER = 1


class Rounding(enum.IntEnum):
    """How an fp32 result becomes a 16-bit weight."""

    NEAREST = 0
    STOCHASTIC = 1


@dataclasses.dataclass(frozen=True)
class Key:
    """The address of a noise vector; element ``i`` of it is ``f(key, i)``.

    Args:
        seed: 64-bit seed of the run.
        step: 32-bit step number.
        probe: which direction of the step, below 2**28.
        stream: NOISE, BASIS, SCHEDULE or ROUNDING.

    >>> Key(seed=0, step=3).to(stream=ROUNDING)
    Key(seed=0, step=3, probe=0, stream=3)
    """

    seed: int
    step: int
    probe: int = 0
    stream: int = NOISE
    clock: Tensor | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, bits in (("seed", 64), ("step", 32), ("probe", 28), ("stream", 4)):
            value = getattr(self, name)
            if not 0 <= value < 1 << bits:
                raise ValueError(f"{name} must be in [0, 2**{bits}), got {value}")

    def to(self, **changes: Any) -> Key:
        """This address with some parts replaced."""
        return dataclasses.replace(self, **changes)

    @property
    def words(self) -> tuple[int, int, int, int]:
        """Philox key words k0, k1 and the upper counter words c2, c3."""
        return (
            self.seed & 0xFFFFFFFF,
            self.seed >> 32,
            self.step,
            self.probe << 4 | self.stream,
        )


@dataclasses.dataclass(frozen=True)
class SmallMask:
    """Keeps the elements with abs(x) ≤ threshold."""

    threshold: float


@dataclasses.dataclass(frozen=True)
class RandomMask:
    """Keeps the elements whose word under ``key`` is at most ``limit`` (of 2³² - 1)."""

    key: Key
    limit: int


Mask = SmallMask | RandomMask


@dataclasses.dataclass(frozen=True)
class Draw:
    """The noise that the elements of a tensor take.

        u_k[i] = f(seed, step, probe + k, stream, offset + i)      if the mask keeps element i, otherwise 0

    Args:
        key: the address of u_0.
        offset: global offset of the tensor's first element.
        distribution: NORMAL, or RADEMACHER for signs.
        mask: which elements take noise; all by default.

    A slice of a tensor takes the slice of its noise:

    >>> from zeroblock.ops import normal
    >>> draw = Draw(Key(seed=0, step=1), offset=7)
    >>> normal(draw, (5,))[2:].equal(normal(draw.at(2), (3,)))
    True
    """

    key: Key
    offset: int = 0
    distribution: Distribution = Distribution.NORMAL
    mask: Mask | None = None

    def at(self, first: int) -> Draw:
        """The draw of the elements from ``first`` on."""
        return dataclasses.replace(self, offset=self.offset + first) if first else self

    def probe(self, k: int) -> Draw:
        """The draw of u_k alone."""
        return dataclasses.replace(self, key=self.key.to(probe=self.key.probe + k)) if k else self

    def to(self, **changes: Any) -> Draw:
        """This draw with some parts replaced."""
        return dataclasses.replace(self, **changes)




def normal(
    key: Key,
    offset: int,
    shape: tuple[int, ...],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    distribution: Distribution = Distribution.NORMAL,
) -> Tensor:
    """A tensor of noise: element i (row-major) is ``f(key, offset + i)``.

    Args:
        key: the address.
        offset: global offset of the first element.
        shape: shape of the result.
        device: where to put it.
        dtype: dtype of the result, fp32 by default; noise is computed in fp32 and rounded to nearest.
        distribution: NORMAL, or RADEMACHER for signs.

    Returns:
        A tensor of ``shape``.

    >>> normal(Key(0, 1), 0, (5,))[2:].equal(normal(Key(0, 1), 2, (3,)))
    True
    """
    import torch

    from . import ops

    out = torch.empty(shape, dtype=dtype or torch.float32, device=device)
    return ops.fill_(out, key, offset=offset, distribution=distribution)


def uniform(key: Key, n: int, offset: int = 0) -> list[float]:
    """``n`` uniform numbers in [0, 1), for choices made on the host.

    >>> len(uniform(Key(0, 0, stream=SCHEDULE), 3))
    3
    """
    from .ops import reference

    return [int(w) / 2**32 for w in reference.words(key, offset, n)]
