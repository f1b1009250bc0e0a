"""Stopping: the first signal lets the step finish, the second quits at once."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO_SECONDS = 2.0
"""Under torchrun, Ctrl-C reaches a rank twice, from the terminal and from torchrun: signals this close count as one."""


class Stopped(Exception):  # noqa: N818 (nothing went wrong)
    """Raised in work that can be stopped at any point, such as an evaluation."""


class Stop:
    """A context manager that notes signals and the end of the time allowed.

    Args:
        minutes: the time allowed; None for no limit.
        echo: seconds within which a second signal counts as a repetition of the first.
    """

    def __init__(self, minutes: float | None = None, echo: float = 0.0) -> None:
        self.signal: int | None = None
        """The signal that was received, if any."""
        self._echo, self._came = echo, 0.0
        self.end = None if minutes is None else time.monotonic() + 60 * minutes
        """The end of the time allowed, on the monotonic clock."""
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            self._handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            if time.monotonic() - self._came < self._echo:
                return
            # the exit status names the signal; the journal keeps every finished step either way
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        self.signal, self._came = number, time.monotonic()

    def heard(self, number: int | None, late: bool) -> None:
        """Take over the reason that all ranks have agreed on.

        Args:
            number: the signal that one of them received, if any.
            late: whether the time is up.
        """
        self.signal = number
        self.end = 0.0 if late else self.end

    @property
    def reason(self) -> str:
        """The reason to stop, in a few words; empty while there is none."""
        if self.signal is not None:
            return "interrupted" if self.signal == signal.SIGINT else "terminated"
        return "the time is up" if self.late else ""

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return self.end is not None and time.monotonic() >= self.end

    @property
    def code(self) -> int:
        """The exit status: 128 plus the signal, as in shells; 0 if only the time is up."""
        return 0 if self.signal is None else 128 + self.signal

    def check(self, *, clock: bool = True) -> None:
        """Raise :class:`Stopped` if there is a reason to stop.

        Args:
            clock: whether the time limit is a reason.
        """
        if self.signal is not None or (clock and self.late):
            raise Stopped(self.reason)
