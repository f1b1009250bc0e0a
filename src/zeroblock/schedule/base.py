"""The protocol of schedules, which choose the blocks of every turn."""

from __future__ import annotations

import abc
import bisect
import functools
import itertools
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from ..noise import SCHEDULE, Key
from ..ops import uniform
from ..registry import Registry

SCHEDULES = Registry("schedule")


@runtime_checkable
class Schedule(Protocol):
    """Chooses the block of a turn; ``turn`` is ``step // interval``.

    A schedule may have two more methods.  ``choose`` replaces ``pick`` if a turn has several blocks or its steps have
    a weight; see :class:`Weighing`.  ``most(n)`` is the largest number of blocks in a turn.
    """

    @property
    def learns(self) -> bool:
        """Whether the next block may depend on earlier measurements."""
        ...

    def pick(self, turn: int, n: int, seed: int, scores: list[float]) -> int:
        """The active block's index in [0, n)."""
        ...

    def observe(self, scores: list[float], block: int, coeffs: tuple[float, ...]) -> None:
        """Learn, in ``scores``, from the coefficients measured on a block."""
        ...


class Blind:
    """Base of schedules that do not learn."""

    learns = False

    def observe(self, scores: list[float], block: int, coeffs: tuple[float, ...]) -> None:
        pass


class Weighing(abc.ABC):
    """Base of schedules that choose several blocks for a turn, or weigh its steps.

    A weight multiplies the learning rate of its block: a block that is drawn more or less often than the rest
    is weighed by the inverse of its probability, so that the expected step stays the same.
    """

    @abc.abstractmethod
    def choose(self, turn: int, n: int, seed: int, scores: list[float]) -> dict[int, float]:
        """The blocks of a turn, each with its weight; records name the first."""

    def pick(self, turn: int, n: int, seed: int, scores: list[float]) -> int:
        return next(iter(self.choose(turn, n, seed, scores)))

    def most(self, n: int) -> int:
        """The largest number of blocks in a turn."""
        return 1

    def weight(self, n: int) -> float:
        """The root mean square of the weights of a block's visits, if no block is preferred."""
        return 1.0


@functools.lru_cache(maxsize=64)
def permutation(n: int, key: Key) -> tuple[int, ...]:
    """A random order of n blocks; cached, because a cycle asks for it n times."""
    draws = uniform(key, n)
    return tuple(sorted(range(n), key=draws.__getitem__))


def stratified(turn: int, n: int, seed: int) -> float:
    """A uniform number in [0, 1); the n numbers of a cycle of turns fall into n equal parts, one each, in random order.

    A block of probability p then comes ⌊np⌋ to ⌈np⌉ + 1 times in a cycle, where independent numbers scatter by √(np).
    """
    part = permutation(n, Key(seed, turn // n, stream=SCHEDULE))[turn % n]
    return (part + uniform(Key(seed, turn, probe=1, stream=SCHEDULE), 1)[0]) / n


def located(draw: float, probabilities: Sequence[float]) -> int:
    """The block whose part of [0, 1) contains a number."""
    return min(bisect.bisect_right(list(itertools.accumulate(probabilities)), draw), len(probabilities) - 1)


def floored(shares: Sequence[float], floor: float) -> list[float]:
    """Probabilities in proportion to ``shares``, each at least ``floor``/n: (1 - floor)·share + floor/n."""
    total = sum(shares)
    return [(1 - floor) * share / total + floor / len(shares) for share in shares]
