"""The journal's file: append-only, checked record by record, written by one process at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import re
import secrets
import struct
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import ZeroBlockError
from ..record import Record
from .header import Header
from .layout import CRC, Layout

MAGIC = b"\x89ZBJ\r\n\x1a\n"
"""Not text, and changed by whatever changes line ends: PNG's idea."""
VERSION = 1
PREFIX = struct.Struct("<8sHHI")
"""Magic, version, two bytes of zero, length of the header."""
MAX_HEADER = 1 << 24
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclasses.dataclass(frozen=True)
class Contents:
    """A journal as read.

    Args:
        header: of the run.
        records: of steps 0, 1, ….
        torn: bytes after the last whole record: a write that did not finish.
        layout: of the records.
    """

    header: Header
    records: list[Record]
    torn: int
    layout: Layout

    @property
    def note(self) -> str:
        """What of the file is not in the records; empty if nothing."""
        return f"{self.torn} bytes of an unfinished write after {len(self.records):,} whole steps" if self.torn else ""


def locate(place: str | Path) -> Path:
    """The journal's file: the path itself, or ``journal.zbj`` of a run's folder."""
    path = Path(place).expanduser()
    return path / "journal.zbj" if path.is_dir() else path


def read(place: str | Path, steps: int | None = None) -> Contents:
    """Read and check a journal, without changing or locking it.

    A damaged record with more after it is an error; an unfinished last one is ``torn``.

    Args:
        place: a journal, or a run's folder.
        steps: only so many, whatever comes after them; all by default.
    """
    path = locate(place)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _failed("read", path, error) from error
    return parse(data, str(place), steps)


def parse(data: bytes, name: str = "the journal", steps: int | None = None) -> Contents:
    """A journal from its bytes; ``name`` is for messages."""
    header, layout, start = _preamble(data, name)
    view, size = memoryview(data)[start:], layout.size
    records: list[Record] = []
    end = len(view) // size
    for step in range(end if steps is None else min(steps, end)):
        record = layout.decode(step, view[step * size : (step + 1) * size])
        if record is None:
            break
        if record.block >= len(header.blocks):
            raise ZeroBlockError(f"{name}: step {step} is on block {record.block}, of {len(header.blocks)}")
        records.append(record)
    if steps is not None and len(records) == steps:
        return Contents(header, records, 0, layout)
    torn = len(view) - len(records) * size
    # What a crash leaves: one record half written, or room for some that were never written, which reads as zeros.
    if view[(len(records) + 1) * size :].tobytes().strip(b"\0"):
        raise ZeroBlockError(
            f"{name}: the record of step {len(records)} is damaged (its checksum does not match) and more follow it; "
            f"those before it are whole: zeroblock replay --step {len(records)} gives the weights they lead to"
        )
    if header.steps is not None and (torn or len(records) != header.steps):
        raise ZeroBlockError(
            f"{name}: the file should hold {header.steps} steps and holds {len(records)}"
            f"{f' and {torn} bytes more' if torn else ''}: it was cut or changed on its way; get it again"
        )
    if steps is not None:
        raise ZeroBlockError(f"{name} holds {len(records)} steps, so there is no step {steps}")
    return Contents(header, records, torn, layout)


class Journal:
    """A journal that a run appends to.

    >>> import tempfile, torch, zeroblock as zb
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
    records: list[Record]
    """Those present at opening."""
    note: str
    """What was cut at opening; empty if nothing."""

    def __init__(self, path: Path, handle: int, contents: Contents, end: int, fsync: float | None) -> None:
        self.path, self.fsync, self.note = path, fsync, ""
        self.header, self.records = contents.header, contents.records
        self.steps = len(contents.records)
        """Records in the file."""
        self._handle, self._layout, self._end = handle, contents.layout, end
        self._synced = time.monotonic()
        self._broken: ZeroBlockError | None = None

    @classmethod
    def create(cls, path: str | Path, header: Header, *, fsync: float | None = 1.0) -> Self:
        """Start a journal; an existing file is refused.

        The file appears under its name with a whole header or not at all.

        Args:
            path: of the file.
            header: of the run.
            fsync: seconds between flushes to the disk; 0 after every record, None never (the system decides).
        """
        path = Path(path)
        data = preamble(header)
        return cls(path, _new(path, data), parse(data, str(path)), len(data), fsync)

    @classmethod
    def open(cls, path: str | Path, *, fsync: float | None = 1.0) -> Self:
        """Continue a journal: take the lock, check every record, cut what a crash left unfinished.

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
            contents = read(path)
            if contents.header.steps is not None:
                raise ZeroBlockError(
                    f"{str(path)!r} is an exported file, which takes no more steps; resume the run's folder"
                )
            end = os.fstat(handle).st_size - contents.torn
            if contents.torn:
                os.ftruncate(handle, end)
                os.fsync(handle)
        except OSError as error:
            os.close(handle)
            raise _failed("open", path, error) from error
        except BaseException:
            os.close(handle)
            raise
        journal = cls(path, handle, contents, end, fsync)
        if contents.torn:
            journal.note = f"cut {contents.note}; the run takes what it lost again"
        return journal

    def append(self, record: Record) -> None:
        """Write the record of the next step; on a failure the file ends with the step before it."""
        if self._broken is not None:
            raise self._broken  # what was written last may be lost, and nothing must follow a hole
        if record.step != self.steps:
            raise ZeroBlockError(f"the journal's next step is {self.steps}, not {record.step}")
        if not 0 <= record.block < len(self.header.blocks):
            raise ZeroBlockError(f"step {record.step}: there is no block {record.block}")
        data = self._layout.encode(record)
        try:
            _write(self._handle, data)
        except OSError as error:
            with contextlib.suppress(OSError):  # it takes no room; where it fails, opening cuts
                os.ftruncate(self._handle, self._end)
            raise self._lost(error) from error
        self._end += len(data)
        self.steps += 1
        if self.fsync is not None and time.monotonic() - self._synced >= self.fsync:
            self.sync()

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        try:
            os.fdatasync(self._handle)
        except OSError as error:
            self._broken = self._lost(error)
            raise self._broken from error
        self._synced = time.monotonic()

    def close(self) -> None:
        """Sync, and let others write; closing twice is closing once."""
        if self._handle < 0:
            return
        try:
            if self.fsync is not None:
                self.sync()
        finally:
            os.close(self._handle)  # gives the lock back
            self._handle = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lost(self, error: OSError) -> ZeroBlockError:
        advice = "free some room" if error.errno in FULL else "see to the disk"
        return ZeroBlockError(
            f"step {self.steps} could not be written to {str(self.path)!r} ({error.strerror}); the journal holds the "
            f"{self.steps} steps before it: {advice}, then zeroblock resume takes it up from there"
        )


def dump(header: Header, records: Iterable[Record]) -> bytes:
    """A whole journal in bytes."""
    start = preamble(header)
    layout = Layout.of(header, CRC.unpack(start[-CRC.size :])[0])
    return start + b"".join(map(layout.encode, records))


def write(path: Path, data: bytes) -> None:
    """Write a whole journal; an existing file is refused."""
    os.close(_new(path, data))


def preamble(header: Header) -> bytes:
    """The bytes before the first record."""
    text = header.encode()
    if len(text) > MAX_HEADER:
        raise ZeroBlockError(f"the header has {len(text):,} bytes, a journal allows {MAX_HEADER:,}")
    data = PREFIX.pack(MAGIC, VERSION, 0, len(text)) + text
    return data + CRC.pack(zlib.crc32(data))


def _preamble(data: bytes, name: str) -> tuple[Header, Layout, int]:
    """Header, layout and where the records start."""
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise ZeroBlockError(f"{name} is not a journal")
    if len(data) < PREFIX.size:
        raise ZeroBlockError(f"{name} has no whole header: it was cut; get it again, or start the run again")
    _, version, reserved, length = PREFIX.unpack_from(data)
    if version != VERSION:
        raise ZeroBlockError(
            f"{name} is a journal of version {version}, this zeroblock reads version {VERSION}: install a newer one"
        )
    start = PREFIX.size + length + CRC.size
    if reserved or length > MAX_HEADER:
        raise ZeroBlockError(f"{name}: the header is damaged; get the file again")
    if len(data) < start:
        raise ZeroBlockError(f"{name} has no whole header: it was cut; get it again, or start the run again")
    root = zlib.crc32(data[: start - CRC.size])
    if CRC.pack(root) != data[start - CRC.size : start]:
        raise ZeroBlockError(f"{name}: the header is damaged (its checksum does not match); get the file again")
    try:
        header = Header.decode(data[PREFIX.size : PREFIX.size + length])
        return header, Layout.of(header, root), start
    except ZeroBlockError as error:
        raise ZeroBlockError(f"{name}: {error}") from error


def _new(path: Path, data: bytes) -> int:
    """A new file, locked and open for appending, that has its name with all of the bytes or not at all."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        handle = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _failed("create", path, error) from error
    try:
        _lock(handle, path)
        _write(handle, data)
        os.fsync(handle)
        _publish(draft, path)
        _sync_folder(path.parent)
    except OSError as error:
        os.close(handle)
        if isinstance(error, FileExistsError):
            raise ZeroBlockError(
                f"{str(path)!r} exists, and a journal is never overwritten; resume it, or give another name"
            ) from error
        raise _failed("create", path, error) from error
    finally:
        draft.unlink(missing_ok=True)
    return handle


def _publish(draft: Path, path: Path) -> None:
    """Give a finished file its name, never another's."""
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError as error:  # a file system without links
        if path.exists():
            raise FileExistsError(errno.EEXIST, "exists") from error
        draft.rename(path)


def _write(handle: int, data: bytes) -> None:
    """All of the bytes: a system may take a part of them first."""
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
    """Who holds the lock, as Linux tells."""
    inode = os.fstat(handle).st_ino
    try:
        locks = Path("/proc/locks").read_text()
    except OSError:
        return "another process"
    found = re.search(rf"FLOCK +ADVISORY +WRITE +(\d+) +\S+:{inode} ", locks)
    return f"process {found[1]}" if found else "another process"


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _failed(verb: str, path: Path, error: OSError) -> ZeroBlockError:
    return ZeroBlockError(f"cannot {verb} the journal {str(path)!r}: {error.strerror or error}")
