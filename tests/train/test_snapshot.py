"""Snapshots shorten the replay, and nothing depends on them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from loop_toy import Kill, kept, settings, undisturbed

from toy import same
from toy import snapshot as copy_of
from zeroblock.errors import ZeroBlockError
from zeroblock.journal import read
from zeroblock.report.view import Quiet
from zeroblock.train import resume, run


@pytest.mark.parametrize("method", ["mezo_bcd_adam", "lozo"])
def test_a_snapshot_shortens_the_replay(
    method: str, llama: Path, data: Path, tmp_path: Path, models: list[Any]
) -> None:
    config = settings(llama, data, method=method, snapshot_every=3)
    whole = run(config, tmp_path / "whole")
    told: list[str] = []

    class Told(Quiet):
        def note(self, text: str) -> None:
            told.append(text)

    run(config, tmp_path / "parts", Kill(8))
    resume(tmp_path / "parts", Told())
    assert "replaying 2 of 8 steps" in told
    assert same(copy_of(models[0]), copy_of(models[-1]))
    assert kept(whole.folder) == kept(tmp_path / "parts")
    # a snapshot beyond what the journal knows of is no use
    run(config, tmp_path / "torn", Kill(8))
    journal = tmp_path / "torn" / "journal.zbj"
    size = (journal.stat().st_size - len(read(journal).header.encode()) - 20) // 8
    os.truncate(journal, journal.stat().st_size - 5 * size - 3)
    told.clear()
    resume(tmp_path / "torn", Told())
    assert "replaying 2 of 2 steps" in told
    assert any("left out" in text for text in told)
    assert kept(whole.folder) == kept(tmp_path / "torn")


@pytest.mark.parametrize("how", ["empty", "cut", "flipped", "another run's", "half removed"])
def test_a_snapshot_that_is_no_use_is_left_alone(how: str, llama: Path, data: Path, tmp_path: Path) -> None:
    config = settings(llama, data, method="mezo_bcd_adam", snapshot_every=3)
    whole = undisturbed(config.replace(snapshot_every=0))
    run(config, tmp_path / "parts", Kill(8))
    place, told = tmp_path / "parts" / "snapshot", []
    weights = place / "weights.safetensors"
    match how:
        case "empty":
            (place / "state.pt").write_bytes(b"")
        case "cut":
            os.truncate(weights, weights.stat().st_size // 2)
        case "flipped":
            data_there = bytearray(weights.read_bytes())
            data_there[-5] ^= 1
            weights.write_bytes(data_there)
        case "another run's":
            run(config.replace(lr=2e-3), tmp_path / "other", Kill(8))
            shutil.rmtree(place)
            shutil.copytree(tmp_path / "other" / "snapshot", place)
        case _:  # killed while the one before was being removed
            (tmp_path / "parts" / "snapshot.old").mkdir()
            (tmp_path / "parts" / "snapshot.old" / "state.pt").write_bytes(b"")

    class Told(Quiet):
        def note(self, text: str) -> None:
            told.append(text)

    resume(tmp_path / "parts", Told())
    assert ("replaying 8 of 8 steps" in told) == (how != "half removed")
    assert any("snapshot is" in text for text in told) == (how != "half removed")
    assert whole == kept(tmp_path / "parts")


def test_a_folder_that_is_called_snapshot_is_let_be(llama: Path, data: Path, tmp_path: Path) -> None:
    """``--out`` may be a folder that holds other things."""
    mine = tmp_path / "run" / "snapshot" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("dear")
    config = settings(llama, data)
    with pytest.raises(ZeroBlockError, match="snapshot exists and is not this run's: give another --out"):
        run(config.replace(snapshot_every=2), tmp_path / "run")
    run(config, tmp_path / "run", Kill(3))
    assert resume(tmp_path / "run").steps == 10
    assert mine.read_text() == "dear"
