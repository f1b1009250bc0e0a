"""The journal in bytes: a preamble with the header, then records of one size, each with its own checksum.

    loss f64 · lr f64 · block u32 · coeffs f32 per probe [· centres f32 per probe] · crc32 u32

``docs/journal.md`` specifies every byte.  Reading is vectorised: a million steps take a third of a second, and a
:class:`~zeroblock.record.Record` is only made for a step that is accessed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ..errors import ZeroBlockError, shown
from ..estimator import Estimator
from ..record import Record
from . import spec
from .header import MAX_SINGLE, Header

MAGIC = b"\x89ZBJ\r\n\x1a\n"
"""Not text, and changed by any conversion of line ends, like PNG's."""
VERSION = 1
PREFIX = struct.Struct("<8sHHI")
"""Magic, version, two zero bytes, length of the header."""
FIXED = struct.Struct("<ddI")
"""Loss, learning rate and block."""
CRC = struct.Struct("<I")
STEP = struct.Struct("<Q")
MAX_HEADER_BYTES = 1 << 24
FEW_RECORDS = 1024
"""Below this many records a loop over zlib is faster than the tables of the vectorised checksum."""
MAX_TABLE_BYTES = 256
"""Records longer than this are checked by the loop: their tables would outgrow the cache."""
CHUNK_RECORDS = 1 << 14
"""The number of records whose checksums are computed at a time, so that the temporaries stay in the cache."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of the records of one journal.

    Losses are not stored, because the estimator can compute them from the loss and the coefficients, to about
    1e-7 of the change that a perturbation makes.  Some estimators need one more number per probe for that, a centre.

    Args:
        probes: coefficients per record.
        estimator: the estimator of the run; None if the journal does not describe it, and then losses are unknown.
        root: checksum of the header, from which every record's checksum starts.
    """

    probes: int
    estimator: Estimator | None
    root: int

    @classmethod
    def of(cls, header: Header, root: int) -> Layout:
        """The layout that a header fixes."""
        data = header.method["estimator"]
        estimator = None if data is None else spec.build("estimator", data)
        if estimator is not None and estimator.probes != header.probes:
            raise ZeroBlockError(f"the header says {header.probes} probes and its estimator {estimator.probes}")
        return cls(header.probes, estimator, root)

    @functools.cached_property
    def dtype(self) -> np.dtype[np.void]:
        """A record as a numpy row, without padding."""
        single = ("<f4", (self.probes,))
        fields: list[Any] = [("loss", "<f8"), ("lr", "<f8"), ("block", "<u4"), ("coeffs", *single)]
        if self.centred:
            fields.append(("centres", *single))
        return np.dtype([*fields, ("crc", "<u4")])

    @property
    def centred(self) -> bool:
        """Whether records have centres."""
        return self.estimator is not None and self.estimator.centred

    @property
    def size(self) -> int:
        """Bytes of a record."""
        return self.dtype.itemsize

    def encode(self, record: Record) -> bytes:
        """A record in bytes; refuse values that no reader would accept."""
        if len(record.coeffs) != self.probes:
            raise ZeroBlockError(f"step {record.step} has {len(record.coeffs)} coefficients, the header {self.probes}")
        if not 0 <= record.lr <= MAX_SINGLE:
            raise ZeroBlockError(f"step {record.step}: the learning rate cannot be {record.lr}")
        centres = (record.curvatures or self._centres(record)) if self.centred else []
        with np.errstate(over="ignore", invalid="ignore"):
            numbers = np.array([*record.coeffs, *centres], "<f4")
        if any(a != b for a, b in zip(numbers.tolist(), record.coeffs, strict=False) if b == b):
            raise ZeroBlockError(f"step {record.step}: coefficients must be fp32 numbers, got {record.coeffs}")
        body = FIXED.pack(record.loss, record.lr, record.block) + numbers.tobytes()
        return body + CRC.pack(self._checksum(record.step, body))

    def _centres(self, record: Record) -> list[float]:
        """The mean loss of every probe minus the loss of the step; zeros if the losses are unknown."""
        each, rest = divmod(len(record.losses), self.probes)
        if rest or not each:
            return [0.0] * self.probes
        groups = [record.losses[a : a + each] for a in range(0, len(record.losses), each)]
        return [sum(group) / each - record.loss for group in groups]

    def decode(self, rows: NDArray[np.void], first: int) -> Iterator[Record]:
        """The records of rows that begin with step ``first``."""
        columns = [rows[name].tolist() for name in ("loss", "lr", "block", "coeffs")]
        curved = self.estimator is not None and self.estimator.curved
        centres = rows["centres"].tolist() if self.centred else itertools.repeat([0.0] * self.probes)
        for step, (loss, lr, block, coeffs, centre) in enumerate(zip(*columns, centres), start=first):  # noqa: B905
            losses = () if self.estimator is None else self.estimator.losses_of(loss, coeffs, centre)
            yield Record(step, block, tuple(coeffs), lr, losses, loss, tuple(centre) if curved else ())

    def _checksum(self, step: int, body: bytes | memoryview) -> int:
        """crc32 of the header's checksum, the step and the body: a record is only valid in its own place."""
        return zlib.crc32(body, zlib.crc32(STEP.pack(step), self.root))

    def checksums(self, rows: NDArray[np.void]) -> NDArray[np.uint32]:
        """The checksums that the records of steps 0, 1, … should have."""
        body = self.size - CRC.size
        if len(rows) < FEW_RECORDS or body > MAX_TABLE_BYTES:
            view = memoryview(rows.tobytes())
            parts = (view[a : a + body] for a in range(0, len(view), self.size))
            return np.fromiter((self._checksum(step, part) for step, part in enumerate(parts)), np.uint32, len(rows))
        tables, constant = self._tables
        cells = rows.view(np.uint8).reshape(len(rows), self.size)
        steps = np.arange(len(rows), dtype="<u8").view(np.uint8).reshape(len(rows), STEP.size)
        found = np.full(len(rows), constant, np.uint32)
        for a in range(0, len(rows), CHUNK_RECORDS):
            part = slice(a, a + CHUNK_RECORDS)
            message = np.concatenate([steps[part], cells[part, :body]], axis=1).T
            for table, column in zip(tables, message, strict=True):
                found[part] ^= table[column]
        return found

    @functools.cached_property
    def _tables(self) -> tuple[NDArray[np.uint32], int]:
        """For every byte of step and body, the share that each of its 256 values XORs into the checksum of zeros.

        A CRC is affine over GF(2), so the checksum of a message of fixed length is the XOR of its bytes' shares.
        """
        length = STEP.size + self.size - CRC.size
        constant = zlib.crc32(bytes(length), self.root)
        shares = []
        for at in range(length):
            start, rest = zlib.crc32(bytes(at), self.root), bytes(length - 1 - at)
            shares.append([zlib.crc32(bytes([value]) + rest, start) for value in range(256)])
        return np.array(shares, np.uint32) ^ np.uint32(constant), constant


class Records(Sequence[Record]):
    """The records of a journal as columns of numbers; a ``Record`` is made when it is accessed.

    Args:
        layout: the layout of the rows.
        rows: one row per step.
        first: the step of the first row.
    """

    def __init__(self, layout: Layout, rows: NDArray[np.void], first: int = 0) -> None:
        self.layout, self.rows, self.first = layout, rows, first

    @property
    def loss(self) -> NDArray[np.float64]:
        return self.rows["loss"]

    @property
    def lr(self) -> NDArray[np.float64]:
        return self.rows["lr"]

    @property
    def block(self) -> NDArray[np.uint32]:
        return self.rows["block"]

    @property
    def coeffs(self) -> NDArray[np.float32]:
        """(steps, probes)."""
        return self.rows["coeffs"]

    @property
    def finite(self) -> NDArray[np.bool_]:
        """For every step, whether it moved the weights."""
        return np.asarray(np.isfinite(self.coeffs).all(axis=1))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, at: int) -> Record: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Record]: ...
    def __getitem__(self, at: int | slice) -> Record | Sequence[Record]:
        steps = range(self.first, self.first + len(self))[at]
        if isinstance(steps, int):
            row = steps - self.first
            return next(self.layout.decode(self.rows[row : row + 1], steps))
        if steps.step == 1:
            return Records(self.layout, self.rows[at], steps.start)
        return [self[step - self.first] for step in steps]

    def __iter__(self) -> Iterator[Record]:
        for a in range(0, len(self), CHUNK_RECORDS):
            yield from self.layout.decode(self.rows[a : a + CHUNK_RECORDS], self.first + a)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class Contents:
    """The contents of a journal.

    Args:
        header: the header of the run.
        records: the records of steps 0, 1, ….
        torn: the number of bytes after the last intact record.
        layout: the layout of the records.
        damaged: whether those bytes begin with a record of full length with a wrong checksum, which is more than a
            write that was cut short.
    """

    header: Header
    records: Records
    torn: int
    layout: Layout
    damaged: bool = False

    @property
    def note(self) -> str:
        """A description of the bytes that are not in the records; empty if there are none."""
        if self.damaged:
            return f"a damaged record of step {len(self.records):,}, whose checksum does not match"
        return f"{self.torn} bytes of an unfinished write after {len(self.records):,} whole steps" if self.torn else ""


def locate(place: str | Path) -> Path:
    """The journal's file: the path itself, or ``journal.zbj`` of a run's folder."""
    path = Path(place).expanduser()
    return path / "journal.zbj" if path.is_dir() else path


def read(place: str | Path, steps: int | None = None) -> Contents:
    """Read and check a journal, without changing or locking it.

    A damaged record with more after it is an error; a last one that is unfinished or damaged is left out, see ``note``.

    Args:
        place: a journal, or a run's folder.
        steps: read this many records, whatever comes after them; all by default.
    """
    path = locate(place)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ZeroBlockError(f"cannot read the journal {str(path)!r}: {error.strerror or error}") from error
    return parse(data, str(place), steps)


def parse(data: bytes, name: str = "the journal", steps: int | None = None) -> Contents:
    """Read a journal from its bytes; ``name`` is for messages."""
    header, layout, start = _preamble(data, name)
    size, rest = layout.size, len(data) - start
    count = rest // size if steps is None else min(steps, rest // size)
    rows = np.frombuffer(data, layout.dtype, count, start) if count else np.empty(0, layout.dtype)
    wrong = np.flatnonzero(layout.checksums(rows) != rows["crc"])
    records = Records(layout, rows[: wrong[0]] if len(wrong) else rows)
    _refuse_absurd(records, header, name)
    good = len(records)
    if steps is not None and good == steps:
        return Contents(header, records, 0, layout)
    tail = data[start + good * size :]
    # A crash leaves one record half written, or room for records that were never written, which reads as zeros.
    if tail[size:].strip(b"\0"):
        raise ZeroBlockError(
            f"{name}: the record of step {good} is damaged (its checksum does not match) and more follow it; "
            f"those before it are whole: zeroblock replay --step {good} gives the weights they lead to"
        )
    if header.steps is not None and (tail or good != header.steps):
        raise ZeroBlockError(
            f"{name}: the file should hold {header.steps} steps and holds {good}"
            f"{f' and {len(tail)} bytes more' if tail else ''}: it was cut or changed on its way; get it again"
        )
    if steps is not None:
        raise ZeroBlockError(f"{name} holds {good} steps, so there is no step {steps}")
    damaged = len(tail) >= size and any(tail[size - CRC.size : size])
    return Contents(header, records, len(tail), layout, damaged)


def _refuse_absurd(records: Records, header: Header, name: str) -> None:
    """Refuse intact records that no optimizer writes: they were made up."""
    with np.errstate(invalid="ignore"):
        rates = ~((records.lr >= 0) & (records.lr <= MAX_SINGLE))
    for what, wrong, values in (
        ("block", records.block >= len(header.blocks), records.block),
        ("learning rate", rates, records.lr),
    ):
        if wrong.any():
            step = int(wrong.argmax())
            allowed = f", of {len(header.blocks)}" if what == "block" else ", which no optimizer writes"
            raise ZeroBlockError(
                f"{name}: step {step} has the {what} {values[step]:g}{allowed}: the file was made up; "
                f"zeroblock replay --step {step} takes the steps before it"
            )


def dump(header: Header, records: Iterable[Record]) -> bytes:
    """A whole journal in bytes."""
    start = preamble(header)
    layout = Layout.of(header, CRC.unpack(start[-CRC.size :])[0])
    if isinstance(records, Records) and records.first == 0 and records.layout.dtype == layout.dtype:
        rows = records.rows.copy()
        rows["crc"] = layout.checksums(rows)
        return start + rows.tobytes()
    return start + b"".join(map(layout.encode, records))


def preamble(header: Header) -> bytes:
    """The bytes before the first record."""
    text = header.encode()
    if len(text) > MAX_HEADER_BYTES:
        raise ZeroBlockError(f"the header has {len(text):,} bytes, a journal allows {MAX_HEADER_BYTES:,}")
    data = PREFIX.pack(MAGIC, VERSION, 0, len(text)) + text
    return data + CRC.pack(zlib.crc32(data))


def _preamble(data: bytes, name: str) -> tuple[Header, Layout, int]:
    """The header, the layout and the offset of the first record."""
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise ZeroBlockError(f"{name} is not a journal")
    if len(data) < PREFIX.size:
        raise ZeroBlockError(f"{name} has no whole header: it was cut; get it again, or start the run again")
    _, version, reserved, length = PREFIX.unpack_from(data)
    if version != VERSION:
        advice = "install a newer zeroblock" if version > VERSION else "there has never been such a version"
        raise ZeroBlockError(
            f"{name} is a journal of version {version}, this zeroblock reads version {VERSION}: {advice}"
        )
    start = PREFIX.size + length + CRC.size
    if reserved or length > MAX_HEADER_BYTES:
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
        raise ZeroBlockError(f"{name}: {shown(error, 1000)}") from error
