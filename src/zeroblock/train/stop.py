"""Stopping: the first signal lets the step finish, a second Ctrl-C quits at once."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):  # noqa: N818 (nothing went wrong)
    """Raised out of what can be left off at any point, an evaluation."""


class Stop:
    """Notes signals and the end of the time allowed, as a context.

    Args:
        minutes: the time allowed; None for no end.
    """

    def __init__(self, minutes: float | None = None) -> None:
        self.signal: int | None = None
        """The signal that came, if one did."""
        self._end = None if minutes is None else time.monotonic() + 60 * minutes
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self._handlers = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number

    @property
    def reason(self) -> str:
        """Why to stop, in a few words; empty while there is no reason to."""
        if self.signal is not None:
            return "interrupted" if self.signal == signal.SIGINT else "terminated"
        return "the time is up" if self.late else ""

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return self._end is not None and time.monotonic() >= self._end

    @property
    def code(self) -> int:
        """The exit status that says so: 128 and the signal, as shells have it."""
        return 0 if self.signal is None else 128 + self.signal

    def check(self, *, clock: bool = True) -> None:
        """Raise :class:`Stopped` where there is a reason to stop.

        Args:
            clock: whether the end of the time is one.
        """
        if self.signal is not None or (clock and self.late):
            raise Stopped(self.reason)
