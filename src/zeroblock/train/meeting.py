"""Meetings: all ranks of a run decide together whether to stop, so that they stop after the same step."""

from __future__ import annotations

import time
from collections.abc import Callable

from .peers import Peers
from .stop import Stop, Stopped

MEETING_SECONDS = 0.5
"""Approximate time between two meetings, and so the delay until all ranks know of a signal."""
MAX_STEPS_BETWEEN = 1000


class Meetings:
    """Decides when a run stops: at every step in one process, about twice per second on several ranks.

    Rank 0 sets the step of the next meeting.  Its clock decides whether the time is up and, if the learning rate
    follows the clock, how many steps are left; a signal on any rank counts.

    Args:
        peers: the ranks.
        stop: the signals and the clock of this rank.
    """

    def __init__(self, peers: Peers, stop: Stop) -> None:
        self.peers, self.stop = peers, stop
        self._last: tuple[int, float] | None = None
        self._next = 0
        self._late = False
        self._left: tuple[int, float] | None = None
        """The step of the last meeting, and the number of steps left then by the clock of rank 0."""

    @property
    def late(self) -> bool:
        """Whether the time is up; several ranks all answer as of their last meeting."""
        return self.stop.late if self.peers.size == 1 else self._late

    def left(self, step: int) -> float | None:
        """The number of steps left by the clock of rank 0; None in one process, which asks its own clock."""
        return None if self._left is None else max(1.0, self._left[1] - (step - self._left[0]))

    def check(self, step: int, *, clock: bool, left: Callable[[int], float], now: bool = False) -> None:
        """Raise :class:`Stopped` on all ranks if there is a reason to stop.

        Args:
            step: the number of steps taken, the same on all ranks.
            clock: whether the time limit is a reason.
            left: returns the number of steps left by the clock of this rank.
            now: whether to meet even if no meeting is due.
        """
        if self.peers.size == 1:
            self.stop.check(clock=clock)
        elif now or step >= self._next:
            self._hold(step, clock, left)

    def _hold(self, step: int, clock: bool, left: Callable[[int], float]) -> None:
        now = time.monotonic()
        rate = 0.0 if self._last is None else (step - self._last[0]) / max(now - self._last[1], 1e-6)
        ahead = max(1, min(MAX_STEPS_BETWEEN, int(rate * MEETING_SECONDS)))
        answers = self.peers.each(lambda: (self.stop.signal, self.stop.late, clock, step + ahead, left(step)))
        _, self._late, ends, self._next, remaining = answers[0]  # not this rank's, which may have fewer records yet
        self._last, self._left = (step, now), (step, remaining)
        if (ends and self._late) or any(signal is not None for signal, *_ in answers):
            raise Stopped

    def settle(self) -> None:
        """Give all ranks the same reason, after all of them have stopped."""
        if self.peers.size > 1:
            answers = self.peers.each(lambda: (self.stop.signal, self.stop.late))
            self.stop.heard(
                next((signal for signal, _ in answers if signal is not None), None), any(late for _, late in answers)
            )
