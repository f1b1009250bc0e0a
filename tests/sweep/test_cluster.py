"""A sweep on a real Ray of this machine, one of whose workers is killed."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import here
import run_toy
from toy import PATIENCE_S, zeroblock

FILE = """
[run]
model = "{model}"
data = "{data}"
method = "mezo_bcd"
steps = 60
eval_every = 60
eval_start = false
batch_size = 4
train = 20
dev = 10
test = 10
[grid]
task = ["sst2"]
lr = [1e-2, 1e-3]
seed = [0, 1, 2]
"""
TIMES = ("seconds",)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [{name: value for name, value in row.items() if name not in TIMES} for row in csv.DictReader(file)]


def processes_with(word: str) -> list[int]:
    """The processes whose environment holds a word; Ray's inherit it, and detach themselves from their parents."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if word.encode() in environment:
            found.append(int(folder.name))
    return found


def test_a_sweep_on_ray_survives_the_death_of_a_worker(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    (tmp_path / "bare").mkdir()  # twelve runs without figures: half the time
    (tmp_path / "bare" / "sitecustomize.py").write_text("import sys; sys.modules['matplotlib'] = None")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'bare'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    marker = tmp_path.name
    run_toy.save_model(tmp_path / "model")
    run_toy.save_sst2(tmp_path / "data")
    file = tmp_path / "toy.toml"
    file.write_text(FILE.format(model=tmp_path / "model", data=tmp_path / "data"))
    limits = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "ZEROBLOCK_TEST": marker}
    command = [
        sys.executable,
        "-m",
        "zeroblock",
        "sweep",
        str(file),
        "--out",
        str(tmp_path / "ray"),
        "--executor",
        "ray",
    ]
    command += ["--jobs", "2", "--json"]
    sweep = subprocess.Popen(
        command, env=os.environ | limits, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    killed = 0
    end = time.monotonic() + PATIENCE_S
    while not killed and sweep.poll() is None:
        assert time.monotonic() < end, "no run began"
        for journal in (tmp_path / "ray" / "runs").glob("*/journal.zbj"):
            if journal.stat().st_size > 1500 and not (journal.parent / "summary.json").exists():
                killed = int((journal.parent / ".lock").read_text())
                os.kill(killed, signal.SIGKILL)
                break
        time.sleep(0.01)
    said, errors = sweep.communicate(timeout=PATIENCE_S)
    assert sweep.returncode == 0, errors
    assert killed
    assert json.loads(said.splitlines()[-1])["finished"] == 6
    told = "".join(path.read_text() for path in (tmp_path / "ray" / "log").glob("*.txt"))
    assert "replaying" in told  # the run continued, and did not begin again

    monkeypatch.setattr("zeroblock.cli.sweep.hiring", here.hiring)  # the crew of this machine, without a new process
    local = zeroblock("sweep", file, "--out", tmp_path / "local")
    assert local.returncode == 0, local.stderr
    assert (tmp_path / "ray" / "table.csv").read_bytes() == (tmp_path / "local" / "table.csv").read_bytes()
    assert rows(tmp_path / "ray" / "runs.csv") == rows(tmp_path / "local" / "runs.csv")
    for steps in (tmp_path / "local" / "runs").glob("*/steps.csv"):
        assert (tmp_path / "ray" / "runs" / steps.parent.name / "steps.csv").read_bytes() == steps.read_bytes()

    end = time.monotonic() + PATIENCE_S
    while left := processes_with(f"ZEROBLOCK_TEST={marker}"):
        assert time.monotonic() < end, f"processes of Ray are left: {left}"
        time.sleep(0.1)
