"""Files that are written whole or not at all, and never through a link.

A run folder may come from anyone, with links planted under the names that a run writes to.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import BinaryIO

_DRAFT = re.compile(r"\..+\.[0-9a-f]{16}\.part")
_DRAFT_FOLDER = re.compile(r"\.snapshot\.[a-z0-9_]{8}\.part")  # the names of tempfile.mkdtemp


def write(path: Path, data: str | bytes) -> None:
    """Write a file atomically: a kill leaves the old file or the new one.

    The draft has a name that no one can guess and must not exist yet, so no link is followed; a
    link under the final name is replaced, and its target stays unchanged.

    Args:
        path: the file; its folder exists.
        data: the whole content; text is written as UTF-8.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with open(handle, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def append(path: Path) -> BinaryIO:
    """Open a file for appending, and create it if needed; refuse a link."""
    return open(_open(path, os.O_WRONLY | os.O_APPEND), "ab")


def open_lock(path: Path) -> int:
    """Open a lock file for reading and writing, and create it if needed; refuse symbolic and hard links.

    The holder of the lock overwrites the file, which must therefore have no other name.
    """
    handle = _open(path, os.O_RDWR)
    if os.fstat(handle).st_nlink > 1:
        os.close(handle)
        raise _link(path)
    return handle


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _link(path) from error
        raise


def _link(path: Path) -> OSError:
    return OSError(errno.ELOOP, f"{path.name} is a link, and links are not followed", str(path))


def make_folder(path: Path) -> None:
    """Create a folder if needed; refuse a link in its place."""
    if path.is_symlink():
        raise _link(path)
    path.mkdir(parents=True, exist_ok=True)


def remove_drafts(folder: Path) -> None:
    """Remove the drafts that killed processes left in a folder; call it only where no other process writes."""
    for path in folder.glob(".*.part"):
        if _DRAFT.fullmatch(path.name) and not path.is_dir():
            path.unlink(missing_ok=True)
    remove_draft_folders(folder)


def remove_draft_folders(folder: Path) -> None:
    """Remove draft snapshots, each as large as the model; of a link, remove the link and not its target."""
    for path in folder.glob(".snapshot.*.part"):
        if not _DRAFT_FOLDER.fullmatch(path.name):
            continue
        if path.is_symlink():
            path.unlink(missing_ok=True)
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
