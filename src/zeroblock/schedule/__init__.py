"""Schedules: the choice of the blocks that are active in a turn.

A schedule is a pure function of the turn, the number of blocks, the seed and
``scores``, one number per block, which the optimizer keeps and some schedules learn
from.  So every schedule replays and resumes.
"""

from ..errors import ZeroBlockError
from .adaptive import Adaptive, Economical, Proportional
from .base import SCHEDULES, Schedule, Weighing
from .layers import Bandit, Subset
from .order import Ascending, Descending, FlipFlop, Shuffled, Uniform

COSTS_ALONE = ";decay=0"
"""Behind the costs of an economical schedule: they alone decide, and not the coefficients."""

__all__ = [
    "COSTS_ALONE",
    "SCHEDULES",
    "Adaptive",
    "Ascending",
    "Bandit",
    "Descending",
    "Economical",
    "FlipFlop",
    "Proportional",
    "Schedule",
    "Shuffled",
    "Subset",
    "Uniform",
    "Weighing",
    "by_name",
]


def by_name(text: str) -> Schedule:
    """A schedule from the command line; "random" is the paper's word for its cyclic random permutation.

    >>> by_name("economical:2,1,0.5")
    Economical(costs=(2.0, 1.0, 0.5), decay=0.1, floor=0.2)
    >>> by_name("economical:2,1,0.5;decay=0")
    Economical(costs=(2.0, 1.0, 0.5), decay=0.0, floor=0.2)
    """
    plain = text.removesuffix(COSTS_ALONE)
    name, colon, costs = plain.partition(":")
    cls = SCHEDULES.named("shuffled" if name == "random" else name)
    if not colon and plain == text:
        return cls()  # type: ignore[no-any-return]
    if cls is not Economical:
        raise ZeroBlockError(f"the schedule {name} takes nothing after a colon, got {text!r}: economical takes costs")
    try:
        numbers = tuple(map(float, costs.split(",")))
    except ValueError as error:
        raise ZeroBlockError(f"costs are numbers with commas between, economical:2,1,0.5; got {text!r}") from error
    return Economical(numbers) if plain == text else Economical(numbers, decay=0.0)
