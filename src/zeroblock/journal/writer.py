"""The writer of a journal: it appends, holds a lock, flushes to the disk, and notices when its file is gone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
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
from . import disk
from .format import Contents, Records, locate, parse, preamble
from .header import Header

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Journal:
    """A journal that a run appends to.

    It keeps the bytes of the file in memory, 28 per step of one probe: a file that is deleted or cut during the run is
    rewritten from them.

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
    """The records that were in the file when it was opened."""
    note: str
    """A description of the bytes after the last whole record, which the first append cuts off; empty if none."""

    def __init__(
        self, path: Path, file: Path, handle: int, contents: Contents, data: bytes, fsync: float | None
    ) -> None:
        self.path, self.fsync, self.note = path, fsync, ""
        self._name = Path(os.path.abspath(path))  # links in it stay as they are
        self._file = file
        """The file behind the links that were there at the beginning; links that appear later are not followed."""
        self.header, self.records = contents.header, contents.records
        self.steps = len(contents.records)
        """The number of records in the file."""
        self._handle, self._layout = handle, contents.layout
        self._data = bytearray(data)
        """The bytes of the file up to an unfinished write."""
        self._torn = contents.torn
        """Bytes of an unfinished write that are still in the file."""
        self._preamble_bytes = len(data) - len(contents.records) * contents.layout.size
        self._synced = time.monotonic()
        self._broken: ZeroBlockError | None = None
        self._replaced: ZeroBlockError | None = None
        _open_journals.add(self)

    @classmethod
    def create(cls, path: str | Path, header: Header, *, fsync: float | None = 1.0) -> Self:
        """Start a journal; an existing file is refused.

        The file appears under its name with a whole header or not at all.

        Args:
            path: the path of the file.
            header: the header of the run.
            fsync: seconds between flushes to the disk; 0 flushes every record, None leaves it to the system.
        """
        path = Path(path)
        file = path.parent.resolve() / path.name
        data = preamble(header)
        contents = parse(data, str(path))
        handle = disk.create(path, data)
        disk.remove_stale_drafts(path, handle)
        return cls(path, file, handle, contents, data, fsync)

    @classmethod
    def open(cls, path: str | Path, *, fsync: float | None = 1.0) -> Self:
        """Continue a journal: take the lock and check every record.

        A write that a crash left unfinished is skipped now and cut off by the first append, so that a journal that
        turns out to belong to another run is not changed.

        Args:
            path: the path of the file, or the run's folder.
            fsync: as in ``create``.
        """
        path = locate(path)
        file = path.resolve()
        try:
            handle = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise disk.failed("open", path, error) from error
        try:
            disk.lock(handle, path)
            data = disk.read_all(handle)
            contents = parse(data, str(path))
            if contents.header.steps is not None:
                raise ZeroBlockError(
                    f"{str(path)!r} is an exported file, which takes no more steps; resume the run's folder"
                )
            disk.remove_stale_drafts(path, handle)
        except OSError as error:
            os.close(handle)
            raise disk.failed("open", path, error) from error
        except BaseException:
            os.close(handle)
            raise
        journal = cls(path, file, handle, contents, data[: len(data) - contents.torn], fsync)
        if contents.torn:
            journal.note = f"left out {contents.note}; the run takes the lost step again"
        return journal

    def append(self, record: Record) -> None:
        """Write the record of the next step; on a failure the file ends with the step before it."""
        if self._broken is not None:
            raise self._broken  # the last records may be lost, and nothing may follow a gap
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
            if self._torn:
                os.ftruncate(self._handle, len(self._data))
                self._torn = 0
            disk.write_all(self._handle, data)
        except OSError as error:
            with contextlib.suppress(OSError):  # truncating takes no space; if it fails, the next open cuts
                os.ftruncate(self._handle, len(self._data))
            raise self._lost(error) from error
        self._data += data
        self.steps += 1
        if self.fsync is not None and time.monotonic() - self._synced >= self.fsync:
            self.sync()

    def sync(self) -> None:
        """Wait until everything is on the disk; a file that was deleted, replaced or cut is rewritten."""
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
        """Sync, and release the lock; a second call does nothing."""
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
        """Check that the file under this name is the one that was written; otherwise restore it from memory."""
        mine = os.fstat(self._handle)
        try:
            there = os.lstat(self._file)
        except (FileNotFoundError, NotADirectoryError):
            self._rewrite("deleted")
            return
        size = len(self._data) + self._torn
        if not os.path.samestat(mine, there):
            if not self._is_older_copy():
                raise self._replaced or self._rescued()
            self._rewrite("replaced by an older copy", replace=True)
        elif mine.st_size != size:
            self._rewrite("cut" if mine.st_size < size else "written to by another program", replace=True)
        elif not disk.is_same(self._name, mine):
            raise ZeroBlockError(
                f"{str(self.path)!r} no longer leads to the run's journal, which is in {str(self._file)!r} with "
                f"{self.steps} steps: restore the link, then zeroblock resume continues from there"
            )

    def _is_older_copy(self) -> bool:
        """Whether the name leads to a regular file with a whole header and only bytes that this run wrote."""
        try:
            handle = os.open(self._file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # a link, a socket, or another user's file
            return False
        try:
            there = os.fstat(handle)
            if not stat.S_ISREG(there.st_mode) or not self._preamble_bytes <= there.st_size <= len(self._data):
                return False
            return self._data.startswith(disk.read_all(handle))
        finally:
            os.close(handle)

    def _rewrite(self, event: str, *, replace: bool = False) -> None:
        try:
            handle = disk.create(self._file, bytes(self._data), replace=replace)
        except ZeroBlockError as error:
            raise ZeroBlockError(
                f"the journal {str(self.path)!r} was {event} during the run and could not be written anew ({error}); "
                f"the {self.steps} steps taken are lost: start the run again"
            ) from error
        self._torn = 0
        os.close(self._handle)
        self._handle = handle
        warnings.warn(
            f"the journal {str(self.path)!r} was {event} during the run; its {self.steps} steps were written anew "
            "from memory",
            ZeroBlockWarning,
            stacklevel=5,
        )

    def _rescued(self) -> ZeroBlockError:
        """Save the journal next to the file that took its name, once; return the error that reports it."""
        rescue = self._file.with_name(f"{self._file.stem}.rescued-{secrets.token_hex(4)}{self._file.suffix}")
        disk.write(rescue, bytes(self._data))
        self._replaced = ZeroBlockError(
            f"{str(self.path)!r} was replaced by another file during the run; the run's own journal, with {self.steps} "
            f"steps, is in {str(rescue)!r}: move it back, then zeroblock resume continues from there"
        )
        return self._replaced

    def _lost(self, error: OSError) -> ZeroBlockError:
        advice = "free some space" if error.errno in DISK_FULL else "check the disk"
        return ZeroBlockError(
            f"step {self.steps} could not be written to {str(self.path)!r} ({error.strerror}); the journal holds the "
            f"{self.steps} steps before it: {advice}, then zeroblock resume continues from there"
        )


_open_journals: weakref.WeakSet[Journal] = weakref.WeakSet()


def _forget_after_fork() -> None:
    """Close the parent's journals in a forked process, which must not write to them or keep their locks alive."""
    for journal in list(_open_journals):
        if journal._handle >= 0:
            os.close(journal._handle)
            journal._handle = -1


os.register_at_fork(after_in_child=_forget_after_fork)
