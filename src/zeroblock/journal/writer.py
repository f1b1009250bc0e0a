"""The writer of a journal: it appends, holds a lock, flushes to the disk, and notices when its file is gone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
import warnings
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import ZeroBlockError, ZeroBlockWarning
from ..record import Record
from .format import Contents, Records, locate, parse, preamble
from .header import Header

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
STALE_DRAFT_SECONDS = 60.0
"""A draft that nobody has locked and that is older than this was left behind by a process that died."""


class Journal:
    """A journal that a run appends to.

    It keeps the bytes of the file in memory, 28 per step of one probe: a file that is deleted or cut during the run is
    written anew from them.

    >>> import tempfile, torch, zeroblock as zb
    >>> from zeroblock.journal import read
    >>> optimizer = zb.mezo(torch.nn.Linear(2, 1), lr=0.1)
    >>> path = Path(tempfile.mkdtemp(), "journal.zbj")
    >>> with Journal.create(path, Header.of(optimizer)) as journal:
    ...     for _ in range(3):
    ...         _ = optimizer.step(lambda: optimizer.model(torch.ones(2)).square().sum())
    ...         journal.append(optimizer.record)
    >>> len(read(path).records)
    3
    """

    header: Header
    records: Records
    """Those that were in the file when it was opened."""
    note: str
    """What opening cut off; empty if nothing."""

    def __init__(self, path: Path, handle: int, contents: Contents, data: bytes, fsync: float | None) -> None:
        self.path, self.fsync, self.note = path, fsync, ""
        self.header, self.records = contents.header, contents.records
        self.steps = len(contents.records)
        """Records in the file."""
        self._handle, self._layout = handle, contents.layout
        self._data = bytearray(data)
        """What the file holds, byte for byte."""
        self._synced = time.monotonic()
        self._broken: ZeroBlockError | None = None
        self._replaced: ZeroBlockError | None = None
        _open_journals.add(self)

    @classmethod
    def create(cls, path: str | Path, header: Header, *, fsync: float | None = 1.0) -> Self:
        """Start a journal; an existing file is refused.

        The file appears under its name with a whole header or not at all.

        Args:
            path: of the file.
            header: of the run.
            fsync: seconds between flushes to the disk; 0 flushes every record, None leaves it to the system.
        """
        path = Path(path)
        data = preamble(header)
        contents = parse(data, str(path))
        handle = _new(path, data)
        _remove_stale_drafts(path, handle)
        return cls(path, handle, contents, data, fsync)

    @classmethod
    def open(cls, path: str | Path, *, fsync: float | None = 1.0) -> Self:
        """Continue a journal: take the lock, check every record, cut off what a crash left unfinished.

        Args:
            path: of the file, or the run's folder.
            fsync: as in ``create``.
        """
        path = locate(path)
        try:
            handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            raise _failed("open", path, error) from error
        try:
            _lock(handle, path)
            data = _read_all(handle)
            contents = parse(data, str(path))
            if contents.header.steps is not None:
                raise ZeroBlockError(
                    f"{str(path)!r} is an exported file, which takes no more steps; resume the run's folder"
                )
            end = len(data) - contents.torn
            if contents.torn:
                os.ftruncate(handle, end)
                os.fsync(handle)
            _remove_stale_drafts(path, handle)
        except OSError as error:
            os.close(handle)
            raise _failed("open", path, error) from error
        except BaseException:
            os.close(handle)
            raise
        journal = cls(path, handle, contents, data[:end], fsync)
        if contents.torn:
            journal.note = f"cut {contents.note}; the run takes the lost step again"
        return journal

    def append(self, record: Record) -> None:
        """Write the record of the next step; on a failure the file ends with the step before it."""
        if self._broken is not None:
            raise self._broken  # the last records may be lost, and nothing must follow a hole
        if self._handle < 0:
            raise ZeroBlockError(
                f"the journal {str(self.path)!r} is closed, or was opened by another process: open it again"
            )
        if record.step != self.steps:
            raise ZeroBlockError(f"the journal's next step is {self.steps}, not {record.step}")
        if not 0 <= record.block < len(self.header.blocks):
            raise ZeroBlockError(f"step {record.step}: there is no block {record.block}")
        data = self._layout.encode(record)
        try:
            _write(self._handle, data)
        except OSError as error:
            with contextlib.suppress(OSError):  # truncating takes no space; where it fails, opening cuts
                os.ftruncate(self._handle, len(self._data))
            raise self._lost(error) from error
        self._data += data
        self.steps += 1
        if self.fsync is not None and time.monotonic() - self._synced >= self.fsync:
            self.sync()

    def sync(self) -> None:
        """Wait until everything is on the disk; a file that was deleted, replaced or cut is written anew."""
        if self._handle < 0:
            return
        try:
            self._keep()
            os.fdatasync(self._handle)
        except OSError as error:
            self._broken = self._lost(error)
            raise self._broken from error
        except ZeroBlockError as error:
            self._broken = error
            raise
        self._synced = time.monotonic()

    def close(self) -> None:
        """Sync, and let others write; a second call does nothing."""
        if self._handle < 0:
            return
        try:
            if self.fsync is not None:
                self.sync()
            else:
                self._keep()
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(self._handle, fcntl.LOCK_UN)  # a copy of the descriptor elsewhere would keep the lock
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _keep(self) -> None:
        """Notice that the file under this name is not the one that was written, and put it back from memory."""
        mine = os.fstat(self._handle)
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            self._rewrite("deleted")
            return
        if not os.path.samestat(mine, there):
            if not self._data.startswith(self.path.read_bytes()):  # not even an older copy: it is somebody's own
                raise self._replaced or self._rescued()
            self._rewrite("replaced by an older copy", replace=True)
        elif mine.st_size != len(self._data):
            self._rewrite("cut" if mine.st_size < len(self._data) else "written to by another program", replace=True)

    def _rewrite(self, event: str, *, replace: bool = False) -> None:
        try:
            handle = _new(self.path.resolve(), bytes(self._data), replace=replace)
        except ZeroBlockError as error:
            raise ZeroBlockError(
                f"the journal {str(self.path)!r} was {event} during the run and could not be written anew ({error}); "
                f"the {self.steps} steps taken are lost: begin the run again"
            ) from error
        os.close(self._handle)
        self._handle = handle
        warnings.warn(
            f"the journal {str(self.path)!r} was {event} during the run; its {self.steps} steps were written anew "
            "from memory",
            ZeroBlockWarning,
            stacklevel=5,
        )

    def _rescued(self) -> ZeroBlockError:
        """Save the journal beside the file that took its name, once; the error that says so."""
        rescue = self.path.with_name(f"{self.path.stem}.rescued-{secrets.token_hex(4)}{self.path.suffix}")
        write(rescue, bytes(self._data))
        self._replaced = ZeroBlockError(
            f"{str(self.path)!r} was replaced by another file during the run; the run's own journal, with {self.steps} "
            f"steps, is in {str(rescue)!r}: move it back, then zeroblock resume takes it up from there"
        )
        return self._replaced

    def _lost(self, error: OSError) -> ZeroBlockError:
        advice = "free some space" if error.errno in DISK_FULL else "check the disk"
        return ZeroBlockError(
            f"step {self.steps} could not be written to {str(self.path)!r} ({error.strerror}); the journal holds the "
            f"{self.steps} steps before it: {advice}, then zeroblock resume takes it up from there"
        )


_open_journals: weakref.WeakSet[Journal] = weakref.WeakSet()


def _forget_after_fork() -> None:
    """A forked process has no business with its parent's journals, and must not keep their locks alive."""
    for journal in list(_open_journals):
        if journal._handle >= 0:
            os.close(journal._handle)
            journal._handle = -1


os.register_at_fork(after_in_child=_forget_after_fork)


def write(path: Path, data: bytes) -> None:
    """Write a whole journal; an existing file is refused."""
    os.close(_new(path, data))


def _new(path: Path, data: bytes, *, replace: bool = False) -> int:
    """A new file, locked and open for appending, that has its name with all of the bytes or not at all.

    The draft has a name that nobody can guess and is created exclusively, so that no planted link is followed.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND | os.O_CLOEXEC
    try:
        handle = os.open(draft, flags, 0o666)
    except OSError as error:
        raise _failed("create", path, error) from error
    try:
        _lock(handle, path)
        _write(handle, data)
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
        raise _failed("create", path, error) from error
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


def _remove_stale_drafts(path: Path, handle: int) -> None:
    """Remove drafts of this journal whose writer died: nobody holds their lock, and they are not new.

    Args:
        path: of the journal.
        handle: of the journal, which is locked.
    """
    named = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}")
    for draft in path.parent.iterdir():
        if not named.fullmatch(draft.name):
            continue
        with contextlib.suppress(OSError):
            found = draft.lstat()
            if not stat.S_ISREG(found.st_mode):
                continue
            if os.path.samestat(found, os.fstat(handle)):  # a second name of the journal itself, and its lock is ours
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


def _read_all(handle: int) -> bytes:
    with os.fdopen(os.dup(handle), "rb") as file:
        file.seek(0)
        return file.read()


def _write(handle: int, data: bytes) -> None:
    """All of the bytes: a system may take only a part of them at first."""
    while data:
        data = data[os.write(handle, data) :]


def _lock(handle: int, path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ZeroBlockError(
            f"{str(path)!r} is being written by {_owner(handle)}; two processes cannot write one journal: "
            "wait for it, or stop it"
        ) from error


def _owner(handle: int) -> str:
    """Who holds the lock, according to Linux."""
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


def _failed(verb: str, path: Path, error: OSError) -> ZeroBlockError:
    return ZeroBlockError(f"cannot {verb} the journal {str(path)!r}: {error.strerror or error}")
