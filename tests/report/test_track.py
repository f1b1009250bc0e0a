"""Trackers: numbers arrive, and what is missing is named with its cure."""

from __future__ import annotations

import importlib.util

import pytest

from zeroblock.errors import ZeroBlockError
from zeroblock.report.track import tracker


def test_no_tracker_does_nothing(tmp_path):
    silent = tracker(None, tmp_path, {})
    silent.log(1, {"loss": 0.5})
    silent.close()
    assert list(tmp_path.iterdir()) == []


def test_tracking_is_turned_off_by_name(tmp_path):
    assert type(tracker("none", tmp_path, {})) is type(tracker(None, tmp_path, {}))


def test_tensorboard_has_every_number(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = tracker("tensorboard", tmp_path, {"lr": 1e-3, "task": "sst2"})
    for step in range(3):
        board.log(step, {"loss": 1.0 / (step + 1), "dev/accuracy": 0.5})
    board.close()
    events = loader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (0, 1.0),
        (1, 0.5),
        (2, pytest.approx(1 / 3)),
    ]
    assert len(events.Scalars("dev/accuracy")) == 3
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| task | sst2 |" in text


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_named(tmp_path, monkeypatch, name):
    monkeypatch.setitem(__import__("sys").modules, name, None)  # what Python does for a module that is not there
    with pytest.raises(ZeroBlockError, match=f"--track {name} needs a package .*: pip install {name}"):
        tracker(name, tmp_path, {})


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_hosted_trackers_without_their_package(tmp_path, name):
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed, and would write beyond this test")
    with pytest.raises(ZeroBlockError, match=f"pip install {name}"):
        tracker(name, tmp_path, {})


def test_a_misspelt_tracker_gets_the_nearest(tmp_path):
    with pytest.raises(ZeroBlockError, match="did you mean 'tensorboard'"):
        tracker("tensorbord", tmp_path, {})
