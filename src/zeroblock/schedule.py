"""Schedules: which block is active in which turn.

A schedule is a pure function of the turn, the number of blocks, the seed and
``scores``: one number per block, which the optimizer keeps and only ``Adaptive``
learns from.  So every schedule replays and resumes.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from typing import Protocol, runtime_checkable

from .errors import ZeroBlockError
from .noise import SCHEDULE, Key
from .ops import uniform
from .registry import Registry

SCHEDULES = Registry("schedule")


@runtime_checkable
class Schedule(Protocol):
    """Chooses the block of a turn; ``turn`` is ``step // interval``."""

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


class _Blind:
    """Base of schedules that do not learn."""

    learns = False

    def observe(self, scores: list[float], block: int, coeffs: tuple[float, ...]) -> None:
        pass


@SCHEDULES.register
@dataclasses.dataclass(frozen=True)
class Ascending(_Blind):
    """0, 1, …, N-1, 0, …: from input to output."""

    def pick(self, turn: int, n: int, seed: int, scores: list[float]) -> int:
        return turn % n


@SCHEDULES.register
@dataclasses.dataclass(frozen=True)
class Descending(_Blind):
    """N-1, …, 1, 0, N-1, …: from output to input."""

    def pick(self, turn: int, n: int, seed: int, scores: list[float]) -> int:
        return n - 1 - turn % n


@SCHEDULES.register
@dataclasses.dataclass(frozen=True)
class FlipFlop(_Blind):
    """0, 1, …, N-1, N-2, …, 1, 0, 1, …; the two ends come half as often as the rest."""

    def pick(self, turn: int, n: int, seed: int, scores: list[float]) -> int:
        if n == 1:
            return 0
        return n - 1 - abs(turn % (2 * n - 2) - (n - 1))


@SCHEDULES.register
@dataclasses.dataclass(frozen=True)
class Shuffled(_Blind):
    """A fresh random permutation each cycle, so that every block comes exactly once in N turns."""

    def pick(self, turn: int, n: int, seed: int, scores: list[float]) -> int:
        if n == 1:
            return 0
        return _permutation(n, Key(seed, turn // n, stream=SCHEDULE))[turn % n]


@functools.lru_cache(maxsize=64)
def _permutation(n: int, key: Key) -> tuple[int, ...]:
    """A random order of n blocks; a cycle asks for it n times."""
    draws = uniform(key, n)
    return tuple(sorted(range(n), key=draws.__getitem__))


@SCHEDULES.register
@dataclasses.dataclass(frozen=True)
class Uniform(_Blind):
    """Independent and uniform, as the paper's theory assumes."""

    def pick(self, turn: int, n: int, seed: int, scores: list[float]) -> int:
        return int(uniform(Key(seed, turn, stream=SCHEDULE), 1)[0] * n)


@SCHEDULES.register
@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Samples block j with probability softmax(z̄ / temperature), where z̄ averages the block's coefficients.

        z̄_j ← decay·|c| + (1 - decay)·z̄_j        p_j ∝ exp(z̄_j / temperature)

    Args:
        decay: weight of a new coefficient c in the moving average.
        temperature: of the softmax.
        warmup: turns before the first adaptive choice; 10·N by default.
        signed: average c itself, as the paper's algorithm writes; its text says the norm, the default here.
        first: schedule of the warm-up; the paper's text says random cycles, its algorithm ascending.
    """

    decay: float = 0.1
    temperature: float = 1.0
    warmup: int | None = None
    signed: bool = False
    first: Schedule = dataclasses.field(default_factory=Shuffled)
    learns = True

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ZeroBlockError(f"Adaptive: decay must be in (0, 1], got {self.decay}")
        if not self.temperature > 0:
            raise ZeroBlockError(f"Adaptive: temperature must be positive, got {self.temperature}")

    def probabilities(self, scores: list[float]) -> list[float]:
        """The probability of each block under these scores."""
        top = max(scores)
        weights = [math.exp((s - top) / self.temperature) for s in scores]
        total = math.fsum(weights)
        return [w / total for w in weights]

    def pick(self, turn: int, n: int, seed: int, scores: list[float]) -> int:
        if turn < (10 * n if self.warmup is None else self.warmup):
            return self.first.pick(turn, n, seed, scores)
        # the probe keeps these draws apart from the warm-up's, which also count turns
        draw = uniform(Key(seed, turn, probe=1, stream=SCHEDULE), 1)[0]
        return min(bisect.bisect_right(list(itertools.accumulate(self.probabilities(scores))), draw), n - 1)

    def observe(self, scores: list[float], block: int, coeffs: tuple[float, ...]) -> None:
        z = sum(c if self.signed else abs(c) for c in coeffs) / len(coeffs)
        scores[block] = self.decay * z + (1 - self.decay) * scores[block]


def by_name(name: str) -> Schedule:
    """A schedule from the command line; "random" is the paper's word for its cyclic random permutation."""
    schedule: Schedule = SCHEDULES.named("shuffled" if name == "random" else name)()
    return schedule
