"""Things that somebody planted in a run folder: links, drafts, trackers, and a journal of another length."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from loop_toy import Kill, settings

from zeroblock import atomic
from zeroblock.errors import ZeroBlockError, ZeroBlockWarning
from zeroblock.train import Config, resume, run


@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_a_lock_that_is_a_link_is_refused(kind: str, llama: Path, data: Path, tmp_path: Path) -> None:
    """The process number is not written over the target."""
    target, lock = tmp_path / "precious", tmp_path / "run" / ".lock"
    target.write_text("precious")
    run(settings(llama, data), tmp_path / "run", Kill(5))
    lock.unlink()
    if kind == "hard":
        os.link(target, lock)
    else:
        lock.symlink_to(target)
    with pytest.raises(ZeroBlockError, match=r"\.lock is a link, and links are not followed\): remove the link, then"):
        resume(tmp_path / "run")
    assert target.read_text() == "precious"
    lock.unlink()
    assert resume(tmp_path / "run").steps == 10


def test_tensorboard_does_not_write_through_a_link(llama: Path, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "elsewhere").mkdir()
    run(settings(llama, data), tmp_path / "run", Kill(5))
    (tmp_path / "run" / "tensorboard").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(ZeroBlockError, match="tensorboard is a link, and links are not followed"):
        resume(tmp_path / "run", track="tensorboard")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_link_to_nowhere_is_called_a_link(tmp_path: Path) -> None:
    (tmp_path / "figures").symlink_to(tmp_path / "missing")
    with pytest.raises(OSError, match="figures is a link, and links are not followed"):
        atomic.make_folder(tmp_path / "figures")
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_folder_cannot_choose_a_tracker_that_uploads(name: str, llama: Path, data: Path, tmp_path: Path) -> None:
    run(settings(llama, data), tmp_path / "run", Kill(5))
    file = tmp_path / "run" / "config.toml"
    file.write_text(f'{file.read_text()}track = "{name}"\n')
    assert Config.load(file).track == name
    with pytest.warns(ZeroBlockWarning, match=rf"track = '{name}' is ignored on resume.* add --track {name} to this"):
        assert resume(tmp_path / "run").steps == 10


def test_the_draft_of_a_snapshot_is_removed_when_the_folder_is_locked(llama: Path, data: Path, tmp_path: Path) -> None:
    run(settings(llama, data), tmp_path / "run", Kill(5))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("precious")
    draft, link, mine = (tmp_path / "run" / f".snapshot.{name}.part" for name in ("ab_12345", "cd_12345", "mine"))
    for folder in (draft, mine):
        folder.mkdir()
        (folder / "weights.safetensors").write_text("half")
    (draft / "inner").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    link.symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    resume(tmp_path / "run")
    assert not draft.exists()
    assert not link.is_symlink()
    assert (mine / "weights.safetensors").read_text() == "half"
    assert (tmp_path / "elsewhere" / "file").read_text() == "precious"


def test_a_journal_longer_than_the_run_is_refused(llama: Path, data: Path, tmp_path: Path) -> None:
    run(settings(llama, data), tmp_path / "run", Kill(8))
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace("steps = 10\n", "steps = 6\n"))
    assert Config.load(file).steps == 6
    before = (tmp_path / "run" / "journal.zbj").read_bytes()
    with pytest.raises(ZeroBlockError, match=r"journal\.zbj holds 8 steps, but config\.toml asks for 6: bring back"):
        resume(tmp_path / "run")
    assert (tmp_path / "run" / "journal.zbj").read_bytes() == before
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_setting_too_large_for_a_float_is_one_line() -> None:
    with pytest.raises(ZeroBlockError, match="lr must be finite"):
        Config.of({"model": "smollm2", "task": "sst2", "lr": 10**400})
