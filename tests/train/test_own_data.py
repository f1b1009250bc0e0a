"""Runs on the user's own data: how they are read is recorded, and old runs are read as they were."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
from loop_toy import Kill, kept, settings

from zeroblock.errors import ZeroBlockWarning
from zeroblock.sweep.plan import Sweep
from zeroblock.train import Config, resume, run
from zeroblock.train.config import recorded
from zeroblock.train.workload import prepare, resolve

OLD = {"turns": "last", "ending": "newline", "metric": "f1"}


def save(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def words(tmp_path: Path) -> Path:
    return save(tmp_path / "w.jsonl", [{"prompt": f"{i} plus one is", "completion": f" {i + 1}"} for i in range(40)])


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    def chat(i: int) -> list[dict[str, str]]:
        said = (f"{i}", "ok", "more", f"{i} is a number that we like very much")
        return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]

    return save(tmp_path / "c.jsonl", [{"messages": chat(i)} for i in range(40)])


def own(model: Path, file: Path, **changes: Any) -> Config:
    config = settings(model, file, task=str(file), steps=4, eval_every=4, eval_limit=3, eval_start=False, **changes)
    return resolve(config.replace(data=None))


def test_runs_of_before_read_their_data_as_they_did(llama: Path, words: Path, chats: Path, tmp_path: Path) -> None:
    config = own(llama, words, **OLD)
    whole = run(config, tmp_path / "whole")
    run(config, tmp_path / "run", Kill(2))
    file = tmp_path / "run" / "config.toml"
    text = file.read_text()
    for name, value in OLD.items():
        text = text.replace(f'{name} = "{value}"\n', "")  # which it could not know of
    file.write_text(text)
    assert recorded(file) == config
    resume(tmp_path / "run")
    assert kept(whole.folder) == kept(tmp_path / "run")
    # as computed by the version before these settings; journals hold these digests
    for data, expected in ((words, "be8be4bdbc7a178eb3d232954ea79f0d"), (chats, "8de3a9fb210c60ba1953db9bd2d03659")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ZeroBlockWarning)  # no chat template
            assert prepare(own(llama, data, **OLD).replace(eval_limit=None)).fingerprint == expected


def test_a_new_run_records_how_its_data_are_read(llama: Path, chats: Path, tmp_path: Path) -> None:
    config = own(llama, chats)
    assert (config.turns, config.ending, config.metric) == ("all", "eos", None)
    with pytest.warns(ZeroBlockWarning, match="no chat template"):
        result = run(config, tmp_path / "run")
    assert recorded(tmp_path / "run" / "config.toml") == config
    assert result.summary is not None
    assert (result.summary["metric"], result.summary["selected_by"]) == ("likelihood", "dev loss")
    assert result.summary["dev"]["value"] == pytest.approx(math.exp(-result.summary["dev"]["loss"]))
    with pytest.warns(ZeroBlockWarning, match="no chat template"):
        workload = prepare(config)
    assert any("its held-out loss decides" in note for note in workload.notes)
    assert all(one.scored is not None for one, _ in workload.train)
    with pytest.warns(ZeroBlockWarning, match="no chat template"):
        assert prepare(config.replace(objective="f1")).task.metric.name == "f1"  # whoever asks for it gets it


def test_a_sweep_does_not_take_old_runs_of_own_data_for_new_ones(words: Path) -> None:
    def digests(task: str, **changes: str) -> list[str]:
        run = {"model": "m", "steps": 100, "lr": 1e-3, "method": "mezo_bcd", "task": task, "loss_over": "examples"}
        return [run.digest for run in Sweep.of("test", {"run": run}, changes).runs.values()]

    assert digests("squad") == digests("squad", ending="newline")  # it does not apply
    assert digests(str(words)) != digests(str(words), ending="newline")
    assert len(digests("hf:user/name")) == 1
