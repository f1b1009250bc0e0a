"""Schedules that choose several blocks for a turn: at random, or as a bandit does."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

from ..errors import ZeroBlockError
from ..noise import SCHEDULE, Key
from ..ops import uniform
from .adaptive import check, softmax
from .base import SCHEDULES, Blind, Weighing, located, permutation


@SCHEDULES.register
@dataclasses.dataclass(frozen=True)
class Subset(Blind, Weighing):
    """Chooses a random subset of the blocks for every turn, all of which a step perturbs and moves together (LeZO).

    Args:
        keep: fraction of the blocks, rounded to a whole number of them and at least one.
    """

    keep: float = 0.25

    def __post_init__(self) -> None:
        check(self, keep=self.keep)

    def most(self, n: int) -> int:
        return max(1, round(self.keep * n))

    def choose(self, turn: int, n: int, seed: int, scores: list[float]) -> dict[int, float]:
        order = permutation(n, Key(seed, turn, stream=SCHEDULE))
        return dict.fromkeys(order[: self.most(n)], 1.0)


@SCHEDULES.register
@dataclasses.dataclass(frozen=True)
class Bandit(Weighing):
    """Draws blocks with replacement, those with large coefficients more often, and corrects for it (AdaLeZO).

        z̄_j ← decay·|c| + (1 - decay)·z̄_j for every block of the step
        p = (1 - floor)·softmax((z̄ / max z̄) / temperature) + floor/N
        k = ⌊keep·N⌋ draws        weight_j = (draws of j)·min(limit, 1 / (k·p_j))

    The expected weight of every block is 1 unless ``limit`` clamps it.

    Args:
        keep: draws as a fraction of the number of blocks; there is at least one.
        temperature: the temperature of the softmax, over scores between 0 and 1.
        decay: weight of a new coefficient c in the moving average.
        floor: the share of the draws that is divided equally among all blocks.
        limit: the largest inverse probability to use.
    """

    keep: float = 0.2
    temperature: float = 0.2
    decay: float = 0.1
    floor: float = 0.01
    limit: float = 32.0
    learns = True

    def __post_init__(self) -> None:
        check(self, keep=self.keep, temperature=self.temperature, decay=self.decay, floor=self.floor)
        if not self.limit > 0:
            raise ZeroBlockError(f"Bandit: limit must be positive, got {self.limit}")

    def most(self, n: int) -> int:
        return max(1, int(self.keep * n))

    def weight(self, n: int) -> float:
        k = self.most(n)
        return math.sqrt((1 + (n - 1) / k) * math.ceil(n / k))

    def probabilities(self, scores: list[float]) -> list[float]:
        """The probability of each block under these scores, in one draw."""
        top, n = max(scores), len(scores)
        preferred = softmax([z / top if top > 1e-6 else z for z in scores], self.temperature)
        return [(1 - self.floor) * q + self.floor / n for q in preferred]

    def choose(self, turn: int, n: int, seed: int, scores: list[float]) -> dict[int, float]:
        p, k = self.probabilities(scores), self.most(n)
        draws = uniform(Key(seed, turn, probe=1, stream=SCHEDULE), k)
        counts = Counter(located(draw, p) for draw in draws)
        return {block: count * min(self.limit, 1 / (k * p[block])) for block, count in counts.items()}

    def observe(self, scores: list[float], block: int, coeffs: tuple[float, ...]) -> None:
        z = sum(map(abs, coeffs)) / len(coeffs)
        scores[block] = self.decay * z + (1 - self.decay) * scores[block]
