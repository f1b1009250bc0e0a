"""Orders: schedules that do not learn, and visit all blocks equally often (flip-flop nearly so)."""

from __future__ import annotations

import dataclasses

from ..noise import SCHEDULE, Key
from ..ops import uniform
from .base import SCHEDULES, Blind, permutation


@SCHEDULES.register
@dataclasses.dataclass(frozen=True)
class Ascending(Blind):
    """0, 1, …, N-1, 0, …: from input to output."""

    def pick(self, turn: int, n: int, seed: int, scores: list[float]) -> int:
        return turn % n


@SCHEDULES.register
@dataclasses.dataclass(frozen=True)
class Descending(Blind):
    """N-1, …, 1, 0, N-1, …: from output to input."""

    def pick(self, turn: int, n: int, seed: int, scores: list[float]) -> int:
        return n - 1 - turn % n


@SCHEDULES.register
@dataclasses.dataclass(frozen=True)
class FlipFlop(Blind):
    """0, 1, …, N-1, N-2, …, 1, 0, 1, …; the two ends come half as often as the rest."""

    def pick(self, turn: int, n: int, seed: int, scores: list[float]) -> int:
        if n == 1:
            return 0
        return n - 1 - abs(turn % (2 * n - 2) - (n - 1))


@SCHEDULES.register
@dataclasses.dataclass(frozen=True)
class Shuffled(Blind):
    """A fresh random permutation each cycle, so that every block comes exactly once in N turns."""

    def pick(self, turn: int, n: int, seed: int, scores: list[float]) -> int:
        if n == 1:
            return 0
        return permutation(n, Key(seed, turn // n, stream=SCHEDULE))[turn % n]


@SCHEDULES.register
@dataclasses.dataclass(frozen=True)
class Uniform(Blind):
    """Independent and uniform, as the paper's theory assumes."""

    def pick(self, turn: int, n: int, seed: int, scores: list[float]) -> int:
        return int(uniform(Key(seed, turn, stream=SCHEDULE), 1)[0] * n)
