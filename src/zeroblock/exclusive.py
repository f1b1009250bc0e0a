"""One thread per model: a forked pass replaces parts of the model while it runs, which other threads would see."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

from torch import nn

from .errors import ZeroBlockError
from .interrupt import uninterrupted

_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_registering = threading.Lock()


class BusyError(ZeroBlockError):
    """Another thread is using the model; the same call may succeed later."""


def refusal(model: nn.Module) -> BusyError:
    """The error that a second thread gets."""
    return BusyError(
        f"another thread is measuring this {type(model).__name__}: a model can be run, measured or trained by one "
        "thread at a time; wait for that thread, or give each thread a model of its own"
    )


@contextlib.contextmanager
def exclusive(model: nn.Module) -> Iterator[None]:
    """A context that one thread at a time may enter for a model; a second one is refused, with the reason."""
    lock = _locks.get(model)
    if lock is None:
        with _registering:
            lock = _locks.setdefault(model, threading.RLock())
    with uninterrupted() as shield:
        if not lock.acquire(blocking=False):
            raise refusal(model)
        try:
            with shield.opened():
                yield
        finally:
            lock.release()
