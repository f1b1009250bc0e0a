"""Ctrl-C arrives between steps, never inside one: half an update would be worse than a short wait."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Shield:
    """Says whether Ctrl-C waits right now."""

    def __init__(self) -> None:
        self.closed = True
        self.waiting: tuple[int, FrameType | None] | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Inside this context Ctrl-C interrupts at once, as usual."""
        self.closed = False
        try:
            yield
        finally:  # one interrupt can land here, but then the exception it raised still runs this line
            self.closed = True


@contextlib.contextmanager
def uninterrupted() -> Iterator[Shield]:
    """Ctrl-C waits until this context ends, except where its shield is opened.

    Only the main thread receives Ctrl-C; in other threads this does nothing.

    >>> with uninterrupted() as shield:
    ...     with shield.opened():
    ...         pass  # a long measurement, which may be interrupted
    ...     pass  # the update, which may not
    """
    shield = Shield()
    handler: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield shield
        return

    def receive(number: int, frame: FrameType | None) -> None:
        if shield.closed:
            shield.waiting = (number, frame)
        else:
            handler(number, frame)

    signal.signal(signal.SIGINT, receive)
    try:
        yield shield
    finally:
        signal.signal(signal.SIGINT, handler)
        if shield.waiting is not None:
            handler(*shield.waiting)
