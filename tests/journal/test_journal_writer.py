"""A journal that loses its file during a run notices, and nothing else keeps its lock or follows a planted link."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path

import pytest
from journal_toy import command, key, save_model, save_reviews, write

import zeroblock as zb
from toy import Tiny
from zeroblock.errors import ZeroBlockError
from zeroblock.journal import Header, Journal, Record, read

RECORD_BYTES = 28


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.zbj"


def begin(path: Path, steps: int = 5, fsync: float | None = 3600.0) -> tuple[Journal, list[Record]]:
    """An open journal and the records it holds."""
    records = [Record(step, 0, (0.5 * step,), 1e-3, (), 1.0 + step) for step in range(20)]
    journal = Journal.create(path, Header.of(zb.mezo(Tiny(), 1e-2)), fsync=fsync)
    for record in records[:steps]:
        journal.append(record)
    return journal, records


def holds(path: Path, records: list[Record]) -> bool:
    return [key(record) for record in read(path).records] == [key(record) for record in records]


# A file that goes missing


@pytest.mark.parametrize("fsync", [3600.0, None, 0.0])
def test_a_deleted_journal_is_written_anew(path: Path, fsync: float | None) -> None:
    journal, records = begin(path, fsync=fsync)
    path.unlink()
    with pytest.warns(zb.ZeroBlockWarning, match=r"was deleted during the run; its \d steps were written anew"):
        journal.append(records[5])  # which syncs where fsync is 0
        journal.close()
    assert holds(path, records[:6])
    with Journal.open(path) as again:  # and it can be resumed
        again.append(records[6])
    assert holds(path, records[:7])


def test_the_journal_goes_on_after_it_was_written_anew(path: Path) -> None:
    journal, records = begin(path)
    path.unlink()
    with pytest.warns(zb.ZeroBlockWarning, match="deleted"):
        journal.sync()
    assert holds(path, records[:5])
    with pytest.raises(ZeroBlockError, match="being written by"):  # the new file is locked as the old one was
        Journal.open(path)
    journal.append(records[5])
    journal.close()
    assert holds(path, records[:6])
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("cut", [1, RECORD_BYTES, 3 * RECORD_BYTES + 5, 10_000])
def test_a_journal_that_was_cut_is_written_anew(path: Path, cut: int) -> None:
    journal, records = begin(path)
    os.truncate(path, max(0, path.stat().st_size - cut))
    journal.append(records[5])  # lands behind the hole
    with pytest.warns(zb.ZeroBlockWarning, match="was cut during the run; its 6 steps"):
        journal.close()
    assert holds(path, records[:6])


def test_bytes_that_another_program_added_are_taken_off_again(path: Path) -> None:
    journal, records = begin(path)
    with path.open("ab") as file:
        file.write(b"hello")
    with pytest.warns(zb.ZeroBlockWarning, match="was written to by another program"):
        journal.close()
    assert holds(path, records[:5])


def test_an_older_copy_in_its_place_is_brought_up_to_date(path: Path) -> None:
    journal, records = begin(path, 3)
    copy = path.read_bytes()
    for record in records[3:6]:
        journal.append(record)
    (path.parent / "copy").write_bytes(copy)
    (path.parent / "copy").rename(path)  # as a tool that synchronises folders does
    with pytest.warns(zb.ZeroBlockWarning, match="was replaced by an older copy"):
        journal.close()
    assert holds(path, records[:6])


def test_another_file_in_its_place_is_left_alone_and_the_run_fails(path: Path) -> None:
    journal, records = begin(path)
    path.unlink()
    path.write_text("precious")
    with pytest.raises(ZeroBlockError, match=r"was replaced by another file during the run; .* with 5 steps, is in"):
        journal.sync()
    with pytest.raises(ZeroBlockError, match="was replaced"):  # a run must not go on without a journal
        journal.append(records[5])
    assert path.read_text() == "precious"
    (rescued,) = path.parent.glob("journal.rescued-*.zbj")
    assert holds(rescued, records[:5])
    with pytest.raises(ZeroBlockError, match="was replaced"):
        journal.close()
    journal.close()
    assert list(path.parent.glob("journal.rescued-*.zbj")) == [rescued]


def test_a_folder_that_is_gone_is_a_clear_failure(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    journal, _ = begin(folder / "journal.zbj")
    (folder / "journal.zbj").unlink()
    folder.rmdir()
    with pytest.raises(ZeroBlockError, match=r"deleted during the run and could not be written anew .*No such file"):
        journal.close()


def test_a_resumed_journal_keeps_the_steps_it_began_with(path: Path) -> None:
    journal, records = begin(path)
    journal.close()
    journal = Journal.open(path)
    journal.append(records[5])
    path.unlink()
    with pytest.warns(zb.ZeroBlockWarning, match="6 steps were written anew"):
        journal.close()
    assert holds(path, records[:6])


@pytest.mark.parametrize(
    ("accident", "code", "message"),
    [("delete", 0, "was deleted during the run; its"), ("replace", 2, "was replaced by another file")],
)
def test_a_run_of_the_command_line_notices(
    accident: str,
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, append = tmp_path / "out", Journal.append

    def then_lose(journal: Journal, record: Record) -> None:
        append(journal, record)
        if record.step == 5:
            journal.path.unlink()
            if accident == "replace":
                journal.path.write_text("precious")

    monkeypatch.setattr(Journal, "append", then_lose)
    with warnings.catch_warnings():
        warnings.simplefilter("always", zb.ZeroBlockWarning)
        found, said = command(
            monkeypatch, capsys, "train", "--model", save_model(tmp_path / "model"), "--task", "sst2", "--data",
            save_reviews(tmp_path / "data"), "--device", "cpu", "--lr", 1e-3, "--steps", 8, "--batch-size", 4,
            "--eval-limit", 2, "--no-eval-start", "--fsync", 3600, "--out", out,
        )  # fmt: skip
    assert found == code, said
    assert message in said
    if accident == "delete":
        assert len(read(out).records) == 8
    else:
        assert (out / "journal.zbj").read_text() == "precious"
        (rescued,) = out.glob("journal.rescued-*.zbj")
        assert len(read(rescued).records) >= 6
        assert not (out / "summary.json").exists()


# Forks


def test_a_forked_worker_does_not_keep_the_lock(path: Path) -> None:
    journal, records = begin(path)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        journal.close()
        with Journal.open(path) as again:  # while the worker lives
            again.append(records[5])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert holds(path, records[:6])


def test_a_forked_worker_can_neither_write_nor_unlock(path: Path) -> None:
    journal, records = begin(path)
    child = os.fork()
    if child == 0:
        try:
            journal.append(records[5])
        except ZeroBlockError as error:
            journal.close()
            os._exit(7 if "opened by another process" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with pytest.raises(ZeroBlockError, match="being written by"):
        Journal.open(path)
    journal.append(records[5])
    journal.close()
    assert holds(path, records[:6])


def test_a_closed_journal_takes_no_steps(path: Path) -> None:
    journal, records = begin(path)
    journal.close()
    with pytest.raises(ZeroBlockError, match="is closed"):
        journal.append(records[5])


# Drafts and links


def old(path: Path) -> Path:
    os.utime(path, (0, 0))
    return path


def test_drafts_of_writers_that_died_are_removed(path: Path) -> None:
    journal, _ = begin(path)
    journal.close()
    folder = path.parent
    stale = folder / ".journal.zbj.0123456789abcdef"
    stale.write_bytes(b"half a header")
    old(stale)
    linked = folder / ".journal.zbj.aaaaaaaaaaaaaaaa"  # the writer died between its two names
    os.link(path, linked)
    young = folder / ".journal.zbj.bbbbbbbbbbbbbbbb"
    young.write_bytes(b"")
    other = folder / ".other.zbj.0123456789abcdef"
    other.write_bytes(b"")
    old(other)
    target = folder / "target"
    target.write_text("precious")
    planted = folder / ".journal.zbj.cccccccccccccccc"
    planted.symlink_to(target)
    Journal.open(path).close()
    assert not stale.exists()
    assert not linked.exists()
    assert young.exists()
    assert other.exists()
    assert planted.is_symlink()
    assert target.read_text() == "precious"


def test_a_draft_that_somebody_is_writing_stays(path: Path) -> None:
    import fcntl

    draft = path.parent / ".journal.zbj.0123456789abcdef"
    draft.write_bytes(b"half a header")
    old(draft)
    with draft.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        begin(path)[0].close()
        assert draft.exists()
    Journal.open(path).close()
    assert not draft.exists()


def test_planted_links_are_never_followed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = path.parent / "target"
    target.write_text("precious")
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * 2 * size)  # as if the name could be guessed
    (path.parent / f".{path.name}.{'0' * 16}").symlink_to(target)
    with pytest.raises(ZeroBlockError, match=r"cannot create the journal .*File exists"):
        begin(path)
    monkeypatch.undo()
    path.symlink_to(target)
    with pytest.raises(ZeroBlockError, match="never overwritten"):
        begin(path)
    path.unlink()
    path.symlink_to(path.parent / "nowhere")
    with pytest.raises(ZeroBlockError, match="never overwritten"):
        begin(path)
    write(path.parent / "run.zbj")
    out = path.parent / "out.zbj"
    out.symlink_to(path.parent / "nowhere")
    with pytest.raises(ZeroBlockError, match="overwritten"):
        zb.journal.export(path.parent / "run.zbj", out)
    assert target.read_text() == "precious"
    assert not (path.parent / "nowhere").exists()


def test_a_journal_behind_a_link_stays_behind_it(path: Path, tmp_path: Path) -> None:
    """A link that somebody made to a larger disk is theirs to make."""
    real = tmp_path / "elsewhere" / "journal.zbj"
    real.parent.mkdir()
    journal, records = begin(real)
    journal.close()
    path.symlink_to(real)
    with Journal.open(path) as journal:
        journal.append(records[5])
        os.truncate(real, 100)
        with pytest.warns(zb.ZeroBlockWarning, match="was cut"):
            journal.sync()
    assert path.is_symlink()
    assert holds(real, records[:6])


# What somebody planted in its place


def plant(path: Path, kind: str) -> Path:
    """Put something in the journal's place; the file or folder that must stay as it is."""
    victim = path.parent / "victim"
    victim.mkdir()
    path.unlink()
    match kind:
        case "a link to nothing":
            path.symlink_to(victim / "created.txt")
        case "a link to an empty file":
            (victim / "empty").touch()
            path.symlink_to(victim / "empty")
        case "an empty file":
            path.touch()
        case "a directory":
            path.mkdir()
        case "a pipe":
            os.mkfifo(path)
    return victim


@pytest.mark.parametrize(
    "kind", ["a link to nothing", "a link to an empty file", "an empty file", "a directory", "a pipe"]
)
@pytest.mark.parametrize("fsync", [3600.0, None])
def test_a_planted_thing_is_neither_followed_nor_replaced(kind: str, fsync: float | None, path: Path) -> None:
    journal, records = begin(path, fsync=fsync)
    victim = plant(path, kind)
    before = [(file.name, file.lstat().st_ino, file.lstat().st_size) for file in [path, *victim.iterdir()]]
    with pytest.raises(ZeroBlockError, match=r"was replaced by another file during the run; .* with 5 steps, is in"):
        journal.close()
    assert [(file.name, file.lstat().st_ino, file.lstat().st_size) for file in [path, *victim.iterdir()]] == before
    (rescued,) = path.parent.glob("journal.rescued-*.zbj")
    assert holds(rescued, records[:5])


def test_a_link_that_was_there_is_resolved_once(path: Path, tmp_path: Path) -> None:
    real = tmp_path / "elsewhere" / "journal.zbj"
    real.parent.mkdir()
    journal, records = begin(real)
    journal.close()
    path.symlink_to(real)
    journal = Journal.open(path)
    journal.append(records[5])
    path.unlink()
    path.symlink_to(tmp_path / "created.txt")
    with pytest.raises(ZeroBlockError, match=r"no longer leads to the run's journal, which is in .*elsewhere"):
        journal.close()
    assert not (tmp_path / "created.txt").exists()
    assert holds(real, records[:6])


def test_a_journal_that_does_not_fit_the_run_is_not_cut(path: Path) -> None:
    journal, records = begin(path)
    journal.close()
    os.truncate(path, path.stat().st_size - 3)
    before = path.read_bytes()
    other = zb.mezo(Tiny(), 1e-2, seed=7)
    with Journal.open(path) as journal, pytest.raises(ZeroBlockError, match="was written with seed"):
        journal.header.check(other)
    assert path.read_bytes() == before
    with Journal.open(path) as journal:
        journal.sync()
        journal.append(records[4])
    assert holds(path, records[:5])
