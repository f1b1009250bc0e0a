"""The files of journals: created whole or not at all, locked, and never through a planted link."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from pathlib import Path

from ..errors import ZeroBlockError

STALE_DRAFT_SECONDS = 60.0
"""An unlocked draft that is older than this was left behind by a process that died."""


def write(path: Path, data: bytes) -> None:
    """Write a whole journal; an existing file is refused."""
    os.close(create(path, data))


def create(path: Path, data: bytes, *, replace: bool = False) -> int:
    """Create a file, locked and open for appending, that appears under its name with all of the bytes or not at all.

    The draft has an unguessable name and is created exclusively, so that no planted link is followed.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND | os.O_CLOEXEC
    try:
        handle = os.open(draft, flags, 0o666)
    except OSError as error:
        raise failed("create", path, error) from error
    try:
        lock(handle, path)
        write_all(handle, data)
        os.fsync(handle)
        if replace:
            draft.replace(path)
        else:
            _publish(draft, path)
        _sync_folder(path.parent)
    except OSError as error:
        os.close(handle)
        if isinstance(error, FileExistsError):
            raise ZeroBlockError(
                f"{str(path)!r} exists, and a journal is never overwritten; resume it, or give another name"
            ) from error
        raise failed("create", path, error) from error
    except BaseException:
        os.close(handle)
        raise
    finally:
        draft.unlink(missing_ok=True)
    return handle


def _publish(draft: Path, path: Path) -> None:
    """Give a finished file its name, unless the name is taken."""
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError as error:  # a file system without links
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "exists") from error
        draft.rename(path)


def remove_stale_drafts(path: Path, handle: int) -> None:
    """Remove drafts of this journal whose writer died: no process holds their lock, and they are not new.

    Args:
        path: the path of the journal.
        handle: the descriptor of the journal, which is locked.
    """
    named = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}")
    for draft in path.parent.iterdir():
        if not named.fullmatch(draft.name):
            continue
        with contextlib.suppress(OSError):
            found = draft.lstat()
            if not stat.S_ISREG(found.st_mode):
                continue
            if os.path.samestat(found, os.fstat(handle)):  # a second name of the journal itself, which we have locked
                draft.unlink()
            elif time.time() - found.st_mtime > STALE_DRAFT_SECONDS:
                _remove_unlocked(draft)


def _remove_unlocked(draft: Path) -> None:
    handle = os.open(draft, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.unlink()
    finally:
        os.close(handle)


def is_same(path: Path, mine: os.stat_result) -> bool:
    """Whether a path, through its links, leads to a file."""
    try:
        return os.path.samestat(path.stat(), mine)
    except OSError:
        return False


def read_all(handle: int) -> bytes:
    """The bytes of an open file, from its beginning."""
    with os.fdopen(os.dup(handle), "rb") as file:
        file.seek(0)
        return file.read()


def write_all(handle: int, data: bytes) -> None:
    """Write all of the bytes: one call to the system may write only some of them."""
    while data:
        data = data[os.write(handle, data) :]


def lock(handle: int, path: Path) -> None:
    """Lock an open file, or say who has locked it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ZeroBlockError(
            f"{str(path)!r} is being written by {_owner(handle)}; two processes cannot write one journal: "
            "wait for it, or stop it"
        ) from error


def _owner(handle: int) -> str:
    """The process that holds the lock, according to Linux."""
    inode = os.fstat(handle).st_ino
    try:
        locks = Path("/proc/locks").read_text()
    except OSError:
        return "another process"
    match = re.search(rf"FLOCK +ADVISORY +WRITE +(\d+) +\S+:{inode} ", locks)
    return f"process {match[1]}" if match else "another process"


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def failed(verb: str, path: Path, error: OSError) -> ZeroBlockError:
    """The error of a journal that cannot be opened or created."""
    return ZeroBlockError(f"cannot {verb} the journal {str(path)!r}: {error.strerror or error}")
