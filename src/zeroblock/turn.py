"""Turns: which block is active at which step.

A turn is ``interval`` steps on one block.  Everything here is pure, so a run, its
replay, a benchmark and a study of schedules all share the same few lines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from .record import Record
from .schedule import Schedule


def clamped(coeffs: Sequence[float], clip: float | None) -> tuple[float, ...]:
    """Coefficients clamped to ±clip, as updates and schedules use them; records keep the measured ones.

    >>> clamped((3.0, -187.0), 5.0)
    (3.0, -5.0)
    """
    return tuple(coeffs if clip is None else (max(-clip, min(clip, c)) for c in coeffs))


@dataclasses.dataclass(frozen=True)
class Turn:
    """The position of a run: before step ``step``, in turn ``number``, on block ``block``.

    Args:
        step: number of steps taken so far.
        number: number of the turn that ``block`` was chosen for.
        block: index of the active block; if there are several, of the one that records name.
        scores: one number per block, from which a schedule that learns chooses.
        weight: factor on the learning rate, by which the schedule corrects for its choice.
        others: further active blocks, each with a factor on the learning rate of ``block``.
    """

    step: int
    number: int
    block: int
    scores: tuple[float, ...]
    weight: float = 1.0
    others: tuple[tuple[int, float], ...] = ()

    @property
    def active(self) -> tuple[tuple[int, float], ...]:
        """All active blocks, each with a factor on the learning rate that the step's record names."""
        return ((self.block, 1.0), *self.others)


@dataclasses.dataclass(frozen=True)
class Turns:
    """Takes turns according to a schedule.

    >>> from zeroblock.schedule import Ascending
    >>> turns = Turns(Ascending(), blocks=3, interval=2, seed=0)
    >>> turn = turns.first()
    >>> [(turn := turns.after(turn)).block for _ in range(6)]
    [0, 1, 1, 2, 2, 0]

    Args:
        schedule: chooses the block of every turn.
        blocks: number of blocks.
        interval: steps per turn.
        seed: seed of the schedule's random choices.
        clip: the schedule learns from coefficients clamped to ±clip.
    """

    schedule: Schedule
    blocks: int
    interval: int
    seed: int
    clip: float | None = None

    @property
    def learns(self) -> bool:
        """Whether the next block may depend on the last measurement; True if the schedule does not say."""
        return getattr(self.schedule, "learns", True)

    def first(self) -> Turn:
        """The beginning of a run."""
        return self.entered(Turn(0, 0, 0, (0.0,) * self.blocks))

    def entered(self, turn: Turn) -> Turn:
        """The same step, in the turn that it belongs to: a new block if a turn begins."""
        number = turn.step // self.interval
        (block, weight), *others = self._chosen(number, list(turn.scores)).items()
        factors = tuple((other, its / weight) for other, its in others)
        return dataclasses.replace(turn, number=number, block=block, weight=weight, others=factors)

    def _chosen(self, number: int, scores: list[float]) -> dict[int, float]:
        """The blocks of a turn, each with its weight."""
        choose = getattr(self.schedule, "choose", None)
        if choose is None:
            return {self.schedule.pick(number, self.blocks, self.seed, scores): 1.0}
        chosen: dict[int, float] = choose(number, self.blocks, self.seed, scores)
        return chosen

    @property
    def most(self) -> int:
        """The largest number of blocks in a turn."""
        return self.schedule.most(self.blocks) if hasattr(self.schedule, "most") else 1

    def counted(self, turn: Turn) -> Turn:
        """One step later, with the block of the next turn not chosen yet."""
        return dataclasses.replace(turn, step=turn.step + 1)

    def due(self, turn: Turn) -> bool:
        """Whether the block of the turn that begins here is still to be chosen."""
        return turn.number != turn.step // self.interval

    def observed(self, turn: Turn, block: int, coeffs: Sequence[float]) -> Turn:
        """The turn after the schedule has seen coefficients measured on a block and the others of its turn."""
        if not self.learns:
            return turn
        scores = list(turn.scores)
        for active in (block, *(other for other, _ in turn.others)):
            self.schedule.observe(scores, active, clamped(coeffs, self.clip))
        return dataclasses.replace(turn, scores=tuple(scores))

    def after(self, turn: Turn, record: Record | None = None) -> Turn:
        """One step later: the schedule sees the step's record, if there is one, and then a new turn may begin."""
        turn = self.counted(turn)
        if record is not None and record.finite:
            turn = self.observed(turn, record.block, record.coeffs)
        return self.entered(turn) if self.due(turn) else turn

    def replayed(self, turn: Turn, records: Iterable[Record]) -> Turn:
        """The turn after the records of consecutive steps."""
        for record in records:
            turn = self.after(turn, record)
        return turn
