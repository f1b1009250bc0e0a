"""Ctrl-C arrives between steps, never inside one: half an update would be worse than a short wait."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_shields: list[Shield] = []
"""The active shields, outermost first; our handler is installed while there is at least one."""
_handler: Any = None
"""The handler that was installed before ours."""
_waiting: tuple[int, FrameType | None] | None = None
"""A Ctrl-C that a shield holds back."""


class Shield:
    """Holds Ctrl-C back while it is closed."""

    closed = True

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Inside this context Ctrl-C interrupts at once, unless an outer shield is closed; so does one held back."""
        self.closed = False
        try:
            _deliver()
            yield
        finally:
            self.closed = True


def held_back() -> bool:
    """Whether a Ctrl-C waits for a shield to end."""
    return _waiting is not None


def _receive(number: int, frame: FrameType | None) -> None:
    global _waiting
    _waiting = (number, frame)
    _deliver()


def _deliver() -> None:
    """Pass on the Ctrl-C that waits, unless a shield is closed; with no shield left, our handler goes first."""
    global _waiting
    if threading.current_thread() is not threading.main_thread() or any(shield.closed for shield in _shields):
        return
    waiting, _waiting = _waiting, None
    if not _shields and signal.getsignal(signal.SIGINT) is _receive:
        signal.signal(signal.SIGINT, _handler)
    if waiting is not None:
        _handler(*waiting)


@contextlib.contextmanager
def uninterrupted() -> Iterator[Shield]:
    """Ctrl-C waits until this context ends, except where its shield is opened.

    Only the main thread receives Ctrl-C; in other threads this does nothing.  There is one handler for
    all nested contexts: a handler per context could be restored in the wrong order by an abandoned generator.

    >>> with uninterrupted() as shield:
    ...     with shield.opened():
    ...         pass  # a long measurement, which may be interrupted
    ...     pass  # the update, which may not
    """
    global _handler
    shield, main = Shield(), threading.current_thread() is threading.main_thread()
    own = _receive if main and _shields else signal.getsignal(signal.SIGINT)  # asking takes three microseconds
    if not main or not callable(own):
        yield shield
        return
    try:
        _shields.append(shield)  # before our handler is installed: so there is no Ctrl-C that it would not hold back
        if own is not _receive:
            _handler = own
            signal.signal(signal.SIGINT, _receive)
        yield shield
    finally:
        if shield in _shields:  # not if an outer context ended first: an abandoned generator
            del _shields[_shields.index(shield) :]
        _deliver()
