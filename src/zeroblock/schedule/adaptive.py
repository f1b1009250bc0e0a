"""Schedules that learn from the coefficients: the paper's, one without a scale, and one that knows what steps cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ..errors import ZeroBlockError
from ..noise import SCHEDULE, Key
from ..ops import uniform
from .base import SCHEDULES, Schedule, Weighing, floored, located, stratified
from .order import Shuffled


@SCHEDULES.register
@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Samples block j with probability softmax(z̄ / temperature), where z̄ averages the block's coefficients.

        z̄_j ← decay·|c| + (1 - decay)·z̄_j        p_j ∝ exp(z̄_j / temperature)

    The temperature has the scale of the coefficients: at 1, the paper's, a block whose coefficients are larger by 10
    is chosen nearly always.  :class:`Proportional` has no scale.

    Args:
        decay: weight of a new coefficient c in the moving average.
        temperature: the temperature of the softmax.
        warmup: turns before the first adaptive choice; 10·N by default.
        signed: average c itself, as in the paper's algorithm; its text says the norm, which is the default here.
        first: schedule of the warm-up; the paper's text says random cycles, its algorithm ascending.
    """

    decay: float = 0.1
    temperature: float = 1.0
    warmup: int | None = None
    signed: bool = False
    first: Schedule = dataclasses.field(default_factory=Shuffled)
    learns = True

    def __post_init__(self) -> None:
        check(self, decay=self.decay, temperature=self.temperature)

    def probabilities(self, scores: list[float]) -> list[float]:
        """The probability of each block under these scores."""
        return softmax(scores, self.temperature)

    def pick(self, turn: int, n: int, seed: int, scores: list[float]) -> int:
        if turn < (10 * n if self.warmup is None else self.warmup):
            return self.first.pick(turn, n, seed, scores)
        # the probe keeps these draws apart from the warm-up's, which also count turns
        return located(uniform(Key(seed, turn, probe=1, stream=SCHEDULE), 1)[0], self.probabilities(scores))

    def observe(self, scores: list[float], block: int, coeffs: tuple[float, ...]) -> None:
        z = sum(c if self.signed else abs(c) for c in coeffs) / len(coeffs)
        scores[block] = self.decay * z + (1 - self.decay) * scores[block]


@SCHEDULES.register
@dataclasses.dataclass(frozen=True)
class Proportional(Weighing):
    """Samples block j in proportion to a power of its mean coefficient z̄_j: an adaptive choice without a scale.

        z̄_j ← decay·|c| + (1 - decay)·z̄_j        p_j = (1 - floor)·z̄_j^power / Σ z̄^power + floor/N

    Multiplying all coefficients by a constant changes nothing, and no block starves.  A block that was not visited yet
    counts as the geometric mean of those that were.  The random numbers are stratified: within N turns a block comes
    nearly as often as its probability says.  As in the paper, the steps are not corrected for the
    probabilities.

    >>> p = Proportional(floor=0.0).probabilities([10.0, 1.0, 1.0, 0.0])  # the last was not visited yet
    >>> [round(one, 2) for one in p]
    [0.71, 0.07, 0.07, 0.15]

    Args:
        decay: weight of a new coefficient c in the moving average.
        power: 1 follows the coefficients, 0 is uniform.
        floor: the share of the turns that is divided equally among all blocks.
    """

    decay: float = 0.1
    power: float = 1.0
    floor: float = 0.1
    learns = True

    def __post_init__(self) -> None:
        check(self, decay=self.decay, floor=self.floor)
        if not (self.power >= 0 and math.isfinite(self.power)):
            raise ZeroBlockError(f"Proportional: power must not be negative, got {self.power}")

    def probabilities(self, scores: list[float]) -> list[float]:
        """The probability of each block under these scores."""
        return floored([size**self.power for size in relative(scores)], self.floor)

    def choose(self, turn: int, n: int, seed: int, scores: list[float]) -> dict[int, float]:
        return {located(stratified(turn, n, seed), self.probabilities(scores)): 1.0}

    def observe(self, scores: list[float], block: int, coeffs: tuple[float, ...]) -> None:
        follow(scores, block, coeffs, self.decay)


@SCHEDULES.register
@dataclasses.dataclass(frozen=True)
class Economical(Weighing):
    """Samples blocks for the most progress per second, and corrects the steps for it.

        q_j ∝ z̄_j / √cost_j        p_j = (1 - floor)·q_j + floor/N        weight_j = 1 / (N·p_j)

    With the weight, the expected step is the mean of the blocks' steps, whatever the probabilities are.  Its second
    moment is Σ z̄_j² / p_j up to a factor, a step takes Σ p_j·cost_j seconds, and the product of both is least at this
    q.  The floor bounds the weights by 1 / floor.

    Without a learning rate steps of all blocks have one size (:class:`~zeroblock.rule.Normalized`), so that the costs
    alone should decide: ``decay=0``, which ``zeroblock train`` takes then.  With one block whose coefficients are ten
    times those of 31 others, z̄ makes the product 20 % larger than a uniform choice does; with a learning rate it makes
    it less than half as large.

    Args:
        costs: the time per step of each block, in any unit; all equal by default.  ``zeroblock train --schedule
            economical`` measures them when a run begins.
        decay: weight of a new coefficient c in the moving average z̄; 0 gives all blocks the same z̄, so that steps need
            not wait for each other's numbers.
        floor: the share of the turns that is divided equally among all blocks.
    """

    costs: tuple[float, ...] = ()
    decay: float = 0.1
    floor: float = 0.2

    def __post_init__(self) -> None:
        check(self, floor=self.floor)
        if not 0 <= self.decay <= 1:
            raise ZeroBlockError(f"Economical: decay must be in [0, 1], got {self.decay}")
        if not self.floor > 0:
            raise ZeroBlockError("Economical: floor must be positive: it bounds the weights of the steps")
        if not all(cost > 0 and math.isfinite(cost) for cost in self.costs):
            raise ZeroBlockError(f"Economical: costs must be positive, got {self.costs}")

    @property
    def learns(self) -> bool:
        """Whether probabilities follow the coefficients, and not the costs alone."""
        return self.decay > 0

    def probabilities(self, scores: list[float]) -> list[float]:
        """The probability of each block under these scores."""
        costs = self.costs or (1.0,) * len(scores)
        if len(costs) != len(scores):
            raise ZeroBlockError(
                f"Economical: there are {len(costs)} costs for {len(scores)} blocks: give one per block, or none"
            )
        return floored([z / math.sqrt(cost) for z, cost in zip(relative(scores), costs, strict=True)], self.floor)

    def choose(self, turn: int, n: int, seed: int, scores: list[float]) -> dict[int, float]:
        p = self.probabilities(scores)
        block = located(stratified(turn, n, seed), p)
        return {block: 1 / (n * p[block])}

    def observe(self, scores: list[float], block: int, coeffs: tuple[float, ...]) -> None:
        if self.learns:
            follow(scores, block, coeffs, self.decay)


def softmax(scores: Sequence[float], temperature: float) -> list[float]:
    """exp(score / temperature), divided by the sum over blocks."""
    top = max(scores)
    weights = [math.exp((s - top) / temperature) for s in scores]
    total = math.fsum(weights)
    return [w / total for w in weights]


def follow(scores: list[float], block: int, coeffs: Sequence[float], decay: float) -> None:
    """Move a block's mean size of coefficients towards the latest; a first visit starts from the others' mean size."""
    z = sum(map(abs, coeffs)) / len(coeffs)
    if not any(scores):
        scores[block] = z
        return
    scores[block] = decay * z + (1 - decay) * (scores[block] or _typical(scores))


def relative(scores: Sequence[float]) -> list[float]:
    """Scores without a scale: each divided by the geometric mean; blocks that were not visited yet have 1."""
    if not any(scores):
        return [1.0] * len(scores)
    typical = _typical(scores)
    return [score / typical if score else 1.0 for score in scores]


def _typical(scores: Sequence[float]) -> float:
    """The geometric mean of the scores of visited blocks."""
    logs = [math.log(score) for score in scores if score]
    return math.exp(math.fsum(logs) / len(logs))


def check(schedule: object, **numbers: float) -> None:
    """Refuse numbers outside of their range."""
    for name, value in numbers.items():
        if name == "temperature":
            right, wanted = value > 0, "positive"
        elif name == "floor":
            right, wanted = 0 <= value <= 1, "in [0, 1]"
        else:
            right, wanted = 0 < value <= 1, "in (0, 1]"
        if not right:
            raise ZeroBlockError(f"{type(schedule).__name__}: {name} must be {wanted}, got {value}")
