"""Runs of a tiny model, what stops them in the middle, and what they leave behind."""

from __future__ import annotations

import functools
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from zeroblock.report.view import Progress, Quiet
from zeroblock.train import Config, joint, run
from zeroblock.train.workload import Workload

OPTIONS: dict[str, dict[str, Any]] = {
    "mezo_bcd_adam": {"interval": 3},
    "mezo_bcd_adaptive": {"probes": 2},
    "lozo": {"interval": 4},  # held for four steps, and for two at the end
    "lozo_m": {"interval": 6},
    "zo_momentum": {"partition": "layers", "schedule": "flip-flop"},
}


def settings(model: Path, data: Path, **changes: Any) -> Config:
    base = {
        "model": str(model), "task": "sst2", "data": str(data), "lr": 1e-3, "steps": 10, "batch_size": 4,
        "eval_every": 4, "device": "cpu", "fsync": 0.0,
    }  # fmt: skip
    method = changes.get("method", "mezo_bcd")
    return Config.of({**base, **OPTIONS.get(method, {}), **changes})


class Kill(Quiet):
    """Sends this process a signal after some step, as a scheduler or a user would."""

    def __init__(self, step: int, number: int = signal.SIGTERM) -> None:
        self.at, self.number = step, number

    def step(self, progress: Progress) -> None:
        if progress.step == self.at:
            os.kill(os.getpid(), self.number)


class Crash(Quiet):
    """Fails after some step, in the middle of everything."""

    def __init__(self, step: int) -> None:
        self.at = step

    def step(self, progress: Progress) -> None:
        if progress.step == self.at:
            raise RuntimeError("a crash")


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models of the runs, as they are left."""
    seen: list[Any] = []
    prepare = joint.prepare

    def spy(*arguments: Any, **options: Any) -> Workload:
        setting = prepare(*arguments, **options)
        seen.append(setting.model)
        return setting

    monkeypatch.setattr(joint, "prepare", spy)
    return seen


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "elapsed")} for line in found]


def kept(folder: Path) -> dict[str, Any]:
    """What must not depend on how often a run was stopped: all but times."""
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "journal": (folder / "journal.zbj").read_bytes(),
        "steps": (folder / "steps.csv").read_text(),
        "metrics": lines(folder),
        "summary": {k: v for k, v in summary.items() if k not in ("seconds", "peak_memory")},
    }


@functools.cache
def undisturbed(config: Config) -> dict[str, Any]:
    """What a run leaves behind that nothing stops."""
    with tempfile.TemporaryDirectory() as folder:
        return kept(run(config, Path(folder) / "run").folder)
