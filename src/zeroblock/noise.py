"""Noise is a function of its address, never a stream.

    u[i] = f(seed, step, probe, stream, i)

where ``i`` is the global element offset: the position of a weight among all
weights of the model.  There is no draw order, so there is none to get wrong:
the noise of a block is the restriction of dense noise, a shard computes its own
slice, and replay stores no tensors.  ``docs/noise.md`` specifies ``f`` to the bit.

This file holds the addresses: :class:`Key` names a vector of noise, :class:`Draw`
the elements of it that a tensor takes.  ``ops`` computes them.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from .errors import ZeroBlockWarning

if TYPE_CHECKING:
    from torch import Tensor

NOISE, BASIS, SCHEDULE, ROUNDING = range(4)
"""Streams: coordinates z, the basis P, block choices, stochastic rounding."""

VERSION = 1
"""Version of the function specified in ``docs/noise.md``."""


class Distribution(enum.IntEnum):
    """The distribution of the coordinates z; both have mean 0 and variance 1."""

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
        clock: (2,) int64 on the device: the step and the first step of its turn.  Kernels read
            them there instead of ``step``, so that a captured launch can be replayed for another
            step; a key of the BASIS stream reads the second entry.

    >>> Key(seed=0, step=3).to(stream=ROUNDING)
    Key(seed=0, step=3, probe=0, stream=3)
    """

    seed: int
    step: int
    probe: int = 0
    stream: int = NOISE
    clock: Tensor | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if (
            0 <= self.seed < 1 << 64
            and 0 <= self.step < 1 << 32
            and 0 <= self.probe < 1 << 28
            and 0 <= self.stream < 1 << 4
        ):
            return
        for name, bits in (("seed", 64), ("step", 32), ("probe", 28), ("stream", 4)):
            value = getattr(self, name)
            if not 0 <= value < 1 << bits:
                raise ValueError(f"{name} must be in [0, 2**{bits}), got {value}")

    def to(self, **changes: Any) -> Key:
        """This address with some parts replaced."""
        return dataclasses.replace(self, **changes)

    def read(self) -> Key:
        """This address with the step that its clock shows, for implementations that run on the host."""
        if self.clock is None:
            return self
        return self.to(step=int(self.clock[1 if self.stream == BASIS else 0]), clock=None)

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
class Rows:
    """The places of the elements of a tensor that is some columns of a wider one: rows, with gaps between them.

        a(i) = ((first + i) div width)·stride + (first + i) mod width

    Args:
        width: elements per row.
        stride: distance from the first element of a row to the first of the next, in the wider tensor.
        first: index in the rows of the tensor's element 0.
    """

    width: int
    stride: int
    first: int = 0


@dataclasses.dataclass(frozen=True)
class Draw:
    """The noise that the elements of a tensor take.

        u_k[i] = f(seed, step, probe + k, stream, offset + a(i))      if the mask keeps element i, otherwise 0

    with a(i) = i, or as :class:`Rows` says.

    Args:
        key: the address of u_0.
        offset: global offset of the tensor's first element.
        distribution: NORMAL, or RADEMACHER for signs.
        mask: which elements take noise; all by default.
        rows: the places of the elements after the offset; one after another by default.

    A slice of a tensor takes the slice of its noise:

    >>> from zeroblock.ops import normal
    >>> draw = Draw(Key(seed=0, step=1), offset=7)
    >>> normal(draw, (5,))[2:].equal(normal(draw.at(2), (3,)))
    True

    So do some columns of a matrix:

    >>> right = Draw(Key(seed=0, step=1), offset=7 + 3, rows=Rows(width=2, stride=5))
    >>> normal(draw, (4, 5))[:, 3:].equal(normal(right, (4, 2)))
    True
    """

    key: Key
    offset: int = 0
    distribution: Distribution = Distribution.NORMAL
    mask: Mask | None = None
    rows: Rows | None = None

    def at(self, first: int) -> Draw:
        """The draw of the elements from ``first`` on."""
        if not first:
            return self
        if self.rows is None:
            return dataclasses.replace(self, offset=self.offset + first)
        return dataclasses.replace(self, rows=dataclasses.replace(self.rows, first=self.rows.first + first))

    def runs(self, n: int) -> Iterator[tuple[int, int]]:
        """The first n elements as runs of consecutive addresses: the first address and the length of each."""
        if self.rows is None:
            yield self.offset, n
            return
        start, stop = self.rows.first, self.rows.first + n
        while start < stop:
            row, column = divmod(start, self.rows.width)
            length = min(self.rows.width - column, stop - start)
            yield self.offset + row * self.rows.stride + column, length
            start += length

    def probe(self, k: int) -> Draw:
        """The draw of u_k alone."""
        return dataclasses.replace(self, key=self.key.to(probe=self.key.probe + k)) if k else self

    def to(self, **changes: Any) -> Draw:
        """This draw with some parts replaced."""
        return dataclasses.replace(self, **changes)


P = ParamSpec("P")
R = TypeVar("R")


def accepts_key(at: int, *, offset_follows: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function of a Draw also take a Key with ``offset``, ``distribution`` and ``mask`` keywords, and warn.

    Version 0.1 had these signatures.

    Args:
        at: position of the draw among the function's arguments.
        offset_follows: whether the argument after the key was its offset.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = getattr(function, "__name__", "function")

        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            if (len(args) > at and isinstance(args[at], Draw)) or "draw" in options:
                return function(*args, **options)
            rest: list[Any] = list(args[at:])
            key = rest.pop(0) if rest else options.pop("key", None)
            if not isinstance(key, Key):
                raise TypeError(f"{name} takes a Draw, got {type(key).__name__}")
            old = {part: options.pop(part) for part in ("offset", "distribution", "mask") if part in options}
            if offset_follows and rest and isinstance(rest[0], int):
                old["offset"] = rest.pop(0)
            draw = Draw(key, **cast(dict[str, Any], old))
            parts = "".join(f", {part}={value!r}" for part, value in old.items())
            warnings.warn(
                f"{name}: a Key with separate offset, distribution and mask is deprecated; "
                f"pass Draw({key!r}{parts}) instead",
                ZeroBlockWarning,
                stacklevel=2,
            )
            return cast(Callable[..., R], function)(*args[:at], draw, *rest, **options)

        return call

    return decorate
