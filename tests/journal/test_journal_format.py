"""The file: what is written is read, what is damaged is refused, what a crash leaves is cut and told."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from journal_toy import key, write

import zeroblock as zb
from toy import PATIENCE_S, Tiny
from zeroblock.errors import ZeroBlockError
from zeroblock.journal import Header, Journal, Record, read
from zeroblock.journal import format as format_of

SIZE = 28


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.zbj"


def records(count: int) -> list[Record]:
    """Made up, of block 0."""
    draw = random.Random(0)
    made = []
    for step in range(count):
        c = float(torch.tensor(draw.gauss(0, 1)))
        made.append(Record(step, 0, (c,), 1e-6 * draw.random(), (2 + 1e-3 * c, 2 - 1e-3 * c), 2.0))
    return made


def start(path: Path, **options: float | None) -> Journal:
    return Journal.create(path, Header.of(zb.mezo(Tiny(), 1e-2), model="tiny"), **options)


def body(path: Path) -> int:
    """Where the records start."""
    return len(format_of.preamble(read(path, 0).header))


# Sizes


def test_twenty_thousand_steps_take_less_than_700_kilobytes(path: Path) -> None:
    optimizer = zb.mezo_bcd(Tiny(depth=24), 1e-5)
    assert len(optimizer.blocks) == 26
    made = [
        Record(step, step % 26, record.coeffs, record.lr, record.losses, record.loss)
        for step, record in enumerate(records(20_000))
    ]
    with Journal.create(path, Header.of(optimizer, model="opt-1.3b")) as journal:
        for record in made:
            journal.append(record)
    assert 20_000 * SIZE < path.stat().st_size < 700_000
    began = time.process_time()  # not the wall clock, which a busy machine slows down
    found = read(path).records
    assert time.process_time() - began < 5
    assert all(key(a) == key(b) for a, b in zip(found, made, strict=True))


@pytest.mark.parametrize(
    ("estimator", "size"),
    [(zb.TwoSided(), 28), (zb.OneSided(), 28), (zb.OneSided(probes=3), 36), (zb.TwoSided(probes=3), 48)],
)
def test_a_step_of_one_probe_fits_32_bytes(estimator: zb.TwoSided, size: int, path: Path) -> None:
    optimizer = zb.ZeroOrder(Tiny(), 1e-2, estimator=estimator)
    Journal.create(path, Header.of(optimizer)).close()
    assert read(path).layout.size == size


# Torn tails


def test_a_tail_torn_at_any_byte_is_cut_and_told(path: Path) -> None:
    made = write(path)
    whole = path.read_bytes()
    for cut in range(1, SIZE):
        path.write_bytes(whole[:-cut])
        found = read(path)
        assert len(found.records) == len(made) - 1
        assert found.torn == SIZE - cut
        with Journal.open(path) as journal:
            assert journal.note == (
                f"left out {SIZE - cut} bytes of an unfinished write after 11 whole steps; "
                "the run takes the lost step again"
            )
            assert [key(r) for r in journal.records] == [key(r) for r in made[:-1]]
            journal.append(made[-1])
        assert path.read_bytes() == whole
    with Journal.open(path) as journal:
        assert journal.note == ""


@pytest.mark.parametrize("zeros", [SIZE, 3 * SIZE, 3 * SIZE + 5, 4096])
def test_room_that_was_never_written_is_cut(path: Path, zeros: int) -> None:
    """After a power failure a file system may have made a file longer and not have written it: zeros."""
    made = write(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10] + bytes(zeros))
    assert read(path).torn == SIZE - 10 + zeros
    with Journal.open(path) as journal:
        assert journal.steps == 11
        journal.append(made[-1])
    assert path.read_bytes() == whole


def test_a_header_cut_anywhere_is_refused(path: Path) -> None:
    write(path)
    whole, start = path.read_bytes(), body(path)
    for cut in range(start):
        path.write_bytes(whole[:cut])
        with pytest.raises(ZeroBlockError, match="no whole header"):
            read(path)
    path.write_bytes(whole[:start])
    assert read(path).records == []


# Damage


def test_flipped_swapped_doubled_and_missing_records_are_refused_by_step(path: Path) -> None:
    write(path)
    whole, start = path.read_bytes(), body(path)
    rows = [whole[a : a + SIZE] for a in range(start, len(whole), SIZE)]
    flipped = bytearray(rows[4])
    flipped[17] ^= 0x10
    for step, changed in {
        4: [*rows[:4], bytes(flipped), *rows[5:]],
        2: [*rows[:2], rows[3], rows[2], *rows[4:]],
        6: [*rows[:6], rows[5], *rows[6:]],
        7: [*rows[:7], *rows[8:]],
        0: rows[1:],
    }.items():
        path.write_bytes(whole[:start] + b"".join(changed))
        for attempt in (read, Journal.open):
            with pytest.raises(ZeroBlockError, match=rf"step {step} is damaged .* replay --step {step} "):
                attempt(path)
        assert len(read(path, step).records) == step
        with pytest.raises(ZeroBlockError, match=f"step {step} is damaged"):
            read(path, step + 1)
        assert path.read_bytes() == whole[:start] + b"".join(changed)


def test_records_of_another_journal_do_not_fit(path: Path, tmp_path: Path) -> None:
    write(path)
    other = tmp_path / "other.zbj"
    with Journal.create(other, Header.of(zb.mezo_bcd(Tiny(), 1e-2, seed=5))) as journal:
        journal.append(Record(0, 0, (1.0,), 1e-2, (), 1.0))
    path.write_bytes(path.read_bytes()[: body(path)] + other.read_bytes()[-SIZE:])
    assert read(path).records == []
    assert read(path).torn == SIZE


def test_another_version_is_refused_by_name(path: Path) -> None:
    write(path)
    whole = bytearray(path.read_bytes())
    whole[8] = 7
    path.write_bytes(whole)
    with pytest.raises(ZeroBlockError, match="a journal of version 7, this zeroblock reads version 1"):
        read(path)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + whole[8:])
    with pytest.raises(ZeroBlockError, match="is not a journal"):
        read(path)
    path.write_text("hello")
    with pytest.raises(ZeroBlockError, match="is not a journal"):
        read(path)


def test_a_header_that_promises_the_world_allocates_nothing(path: Path) -> None:
    path.write_bytes(format_of.PREFIX.pack(format_of.MAGIC, 1, 0, 0xFFFFFFFF))
    with pytest.raises(ZeroBlockError, match="header is damaged"):
        read(path)


# Appending


def test_steps_come_in_order_and_whole(path: Path) -> None:
    made = records(3)
    with start(path) as journal:
        journal.append(made[0])
        for wrong, message in (
            (made[2], "next step is 1, not 2"),
            (made[0], "next step is 1, not 0"),
            (Record(1, 1, (1.0,), 1e-2, (), 1.0), "no block 1"),
            (Record(1, 0, (1.0, 2.0), 1e-2, (), 1.0), "2 coefficients, the header 1"),
            (Record(1, 0, (0.1,), 1e-2, (), 1.0), "must be fp32"),
            (Record(1, 0, (1e300,), 1e-2, (), 1.0), "must be fp32"),
        ):
            with pytest.raises(ZeroBlockError, match=message):
                journal.append(wrong)
        journal.append(made[1])
    assert [key(r) for r in read(path).records] == [key(r) for r in made[:2]]


def test_what_is_not_finite_comes_back(path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    with start(path) as journal:
        journal.append(Record(0, 0, (nan,), 1e-2, (nan, 1.0), nan))
        journal.append(Record(1, 0, (-inf,), 1e-2, (-inf, 1.0), -inf))
    first, second = read(path).records
    assert first.coeffs[0] != first.coeffs[0]
    assert first.loss != first.loss
    assert (second.coeffs, second.loss) == ((-inf,), -inf)


def test_an_existing_file_is_never_overwritten(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(ZeroBlockError, match="never overwritten"):
        start(path)
    assert path.read_text() == "precious"
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_journal_starts_with_the_run(path: Path) -> None:
    optimizer = zb.mezo(Tiny(), 1e-2)
    optimizer.step(lambda: 1.0)
    with pytest.raises(ZeroBlockError, match="starts at step 0 and this optimizer is at step 1"):
        Header.of(optimizer)


def test_fsync_is_as_asked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda handle: (calls.append(handle), real(handle)))
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    # 20 records, a second apart: flushed at every fourth, and once more at the end
    for fsync, expected in ((0, 21), (None, 0), (3600.0, 1), (4.0, 6)):
        calls.clear()
        with start(path, fsync=fsync) as journal:
            for record in records(20):
                now += 1.0
                journal.append(record)
        assert len(calls) == expected, fsync
        path.unlink()


def test_a_clock_that_goes_backwards_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path)
    expected = path.read_bytes()
    path.unlink()
    clock = iter(range(2_000_000_000, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    monkeypatch.setattr(time, "time_ns", lambda: next(clock) * 10**9)
    write(path)
    assert path.read_bytes() == expected


# Locks


def test_two_processes_cannot_write_one_journal(path: Path) -> None:
    with start(path) as journal:
        code = f"from zeroblock.journal import Journal; Journal.open({str(path)!r})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 1
        assert f"is being written by process {os.getpid()}; two processes cannot write one journal" in done.stderr
        with pytest.raises(ZeroBlockError, match="being written by"):
            Journal.open(path)
        journal.append(records(1)[0])
        assert len(read(path).records) == 1  # reading needs no lock
    Journal.open(path).close()


# Disks


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Root may write anywhere; be somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_read_only_folder_is_one_clear_error() -> None:
    header = Header.of(zb.mezo(Tiny(), 1e-2))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Journal.create(folder / "journal.zbj", header).close()
        (folder / "journal.zbj").chmod(0o444)
        folder.chmod(0o555)
        with unprivileged():
            with pytest.raises(ZeroBlockError, match=r"cannot create the journal '.*': Permission denied"):
                Journal.create(folder / "new.zbj", header)
            with pytest.raises(ZeroBlockError, match=r"cannot open the journal '.*': Permission denied"):
                Journal.open(folder)
            assert read(folder).records == []
            with pytest.raises(ZeroBlockError, match=r"cannot read the journal '.*': No such file"):
                read(folder / "none.zbj")
        folder.chmod(0o755)


@pytest.mark.parametrize("room", [0, 1, 5 * SIZE + 13, 6 * SIZE])
def test_a_full_disk_leaves_whole_records(path: Path, room: int) -> None:
    journal, whole = start(path), room // SIZE
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, before[1]))
    try:
        for record in records(100)[:whole]:
            journal.append(record)
        with pytest.raises(ZeroBlockError) as caught:
            journal.append(records(100)[whole])
        size = path.stat().st_size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    message = str(caught.value)
    journal.append(records(100)[journal.steps])
    steps = journal.steps
    journal.close()
    assert f"step {whole} could not be written to" in message
    assert f"the journal holds the {whole} steps before it: free some space, then zeroblock resume" in message
    assert size == body(path) + whole * SIZE
    assert steps == whole + 1
    with Journal.open(path) as journal:
        assert journal.note == ""
        assert journal.steps == whole + 1


# Kills


def test_a_writer_killed_twenty_times_loses_nothing_that_was_whole(path: Path) -> None:
    made, draw, known = records(20 * 400), random.Random(7), 0
    start(path).close()
    for _ in range(20):
        goal, end = path.stat().st_size + draw.randrange(200 * SIZE), time.monotonic() + PATIENCE_S
        ready, tell = os.pipe()
        child = os.fork()  # a process of its own that has everything imported
        if child == 0:
            try:
                with Journal.open(path, fsync=0.01) as journal:
                    os.write(tell, b"!")
                    for step in range(journal.steps, journal.steps + 400):
                        journal.append(made[step])
                    signal.pause()  # the kill comes late on a busy machine
            finally:
                os._exit(1)  # only reached by what went wrong
        os.close(tell)
        assert os.read(ready, 1) == b"!"
        os.close(ready)
        while path.stat().st_size < goal and time.monotonic() < end:
            time.sleep(0.0001)
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        found = read(path).records
        assert len(found) >= known
        known = len(found)
    assert known > 100
    assert all(key(a) == key(b) for a, b in zip(found, made, strict=False))


def test_nothing_is_written_after_what_may_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk failed to take what was written: a record beyond it would come after a hole."""
    optimizer = zb.mezo_bcd(Tiny(), 1e-2)
    journal = Journal.create(tmp_path / "journal.zbj", Header.of(optimizer), fsync=0.0)
    journal.append(Record(0, 0, (1.0,), 1e-2, (), 1.0))

    def failing(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing)
        with pytest.raises(zb.ZeroBlockError, match="Input/output error"):
            journal.append(Record(1, 0, (1.0,), 1e-2, (), 1.0))
    with pytest.raises(zb.ZeroBlockError, match="Input/output error"):
        journal.append(Record(2, 0, (1.0,), 1e-2, (), 1.0))
    journal.close()
    assert len(read(tmp_path / "journal.zbj").records) <= 2


# Many records


@pytest.mark.parametrize("estimator", [zb.TwoSided(), zb.TwoSided(probes=3), zb.OneSided(probes=70)], ids=str)
@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 20_000])
def test_checksums_of_many_records_are_those_of_each(estimator: zb.TwoSided, count: int) -> None:
    """The vectorised checksum against zlib's, on both sides of the sizes where it takes over."""
    header = Header.of(zb.ZeroOrder(Tiny(), 1e-2, estimator=estimator, seed=count))
    layout = format_of.Layout.of(header, 0xDEADBEEF)
    data = random.Random(count).randbytes(count * layout.size)
    rows = format_of.np.frombuffer(data, layout.dtype) if count else format_of.np.empty(0, layout.dtype)
    expected = [
        zlib.crc32(data[a : a + layout.size - 4], zlib.crc32(step.to_bytes(8, "little"), 0xDEADBEEF))
        for step, a in enumerate(range(0, len(data), layout.size))
    ]
    assert layout.checksums(rows).tolist() == expected


def test_damage_among_many_records_is_found(path: Path) -> None:
    with start(path, fsync=None) as journal:
        for record in records(3000):
            journal.append(record)
    whole, begin = path.read_bytes(), body(path)
    for step in (0, 1, 255, 256, 1500, 2998):
        changed = bytearray(whole)
        changed[begin + step * SIZE + 9] ^= 4
        with pytest.raises(ZeroBlockError, match=f"step {step} is damaged"):
            format_of.parse(bytes(changed))


def test_reading_makes_no_record_before_it_is_looked_at(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = records(2000)
    with start(path, fsync=None) as journal:
        for record in made:
            journal.append(record)
    built: list[int] = []

    def count(*values: object) -> Record:
        built.append(values[0])
        return Record(*values)

    monkeypatch.setattr(format_of, "Record", count)
    found = read(path).records
    assert len(found) == 2000
    assert found.lr.tolist() == [record.lr for record in made]
    assert found.finite.all()
    assert built == []
    assert key(found[1234]) == key(made[1234])
    assert key(found[-1]) == key(made[-1])
    assert built == [1234, 1999]
    part = found[500:700]
    assert built == [1234, 1999]
    assert [key(record) for record in part] == [key(record) for record in made[500:700]]
    assert [key(record) for record in part[10:20]] == [key(record) for record in made[510:520]]
    assert [key(record) for record in found[::-400]] == [key(record) for record in made[::-400]]
    assert [record.step for record in reversed(part)] == list(range(699, 499, -1))
    with pytest.raises(IndexError):
        found[2000]
