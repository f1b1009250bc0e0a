"""One writer per folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from . import atomic
from .errors import ZeroBlockError


def acquire(folder: Path) -> int:
    """Make this process the only writer of a folder, and return the handle for :func:`release`.

    Args:
        folder: an existing folder; its file ``.lock`` then holds the number of this process.
    """
    handle = atomic.open_lock(folder / ".lock")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())
    except OSError as error:
        owner = os.pread(handle, 20, 0).decode(errors="replace").strip()
        os.close(handle)
        if not isinstance(error, BlockingIOError):
            raise
        who = f"process {owner}" if owner.isdecimal() else "another process"
        raise ZeroBlockError(f"{folder} is being written by {who}: wait for it, or stop it") from error
    return handle


def release(handle: int) -> None:
    """Let another process write."""
    fcntl.flock(handle, fcntl.LOCK_UN)  # close alone keeps the lock while a forked child has the file open
    os.close(handle)


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Inside this context no other process writes to the folder, which is created if needed.

    >>> with only_writer(Path("runs/race")):  # doctest: +SKIP
    ...     ...

    Args:
        folder: the folder.
    """
    atomic.make_folder(folder)
    handle = acquire(folder)
    try:
        yield
    finally:
        release(handle)
