"""Sweeps for real, on a tiny model: several at a time, failing, killed and continued."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import run_toy
from toy import PATIENCE_S, zeroblock
from zeroblock.lock import only_writer
from zeroblock.sweep.hands import Hands
from zeroblock.sweep.plan import Run

COMMAND = [sys.executable, "-c", "import typer; from zeroblock.cli.sweep import sweep; typer.run(sweep)"]
FILE = """
tune = ["lr"]
tune_seeds = 1
[run]
model = "{model}"
steps = {steps}
batch_size = 4
train = 20
dev = 10
test = 10
[grid]
task = {tasks}
seed = [0, 1]
[[case]]
name = "Zero-shot"
method = "zero-shot"
seed = 0
[[case]]
name = "MeZO-BCD"
method = "mezo_bcd"
lr = [1e-2, 1e-3]
"""


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("toys")
    run_toy.save_model(folder / "model")
    run_toy.save_sst2(folder / "data")
    return folder


def sweep_file(toys: Path, path: Path, steps: int = 5, tasks: str = '["sst2"]') -> Path:
    path.write_text(FILE.format(model=toys / "model", steps=steps, tasks=tasks))
    return path


def start(toys: Path, file: Path, *more: str, figures: bool = False, ignoring: bool = False) -> subprocess.Popen[str]:
    command = [*COMMAND, str(file), "--out", str(file.parent / "out"), "--data", str(toys / "data"), *more]
    limits = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    if not figures:  # half the time
        (file.parent / "bare").mkdir(exist_ok=True)
        (file.parent / "bare" / "sitecustomize.py").write_text("import sys; sys.modules['matplotlib'] = None")
        limits["PYTHONPATH"] = f"{file.parent / 'bare'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    if ignoring:  # Ctrl-C, as a shell without job control starts what runs in the background
        command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
    return subprocess.Popen(command, env=os.environ | limits, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(holds: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_sweep_from_the_first_run_to_the_table(toys, tmp_path):
    file = sweep_file(toys, tmp_path / "toy.toml")
    process = start(toys, file, "--jobs", "2", "--json", figures=True)
    said, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    *ends, last = map(json.loads, said.splitlines())
    assert last == {
        "out": str(tmp_path / "out"),
        "finished": 4,
        "failed": 0,
        "table": str(tmp_path / "out" / "table.md"),
    }
    assert sorted((end["method"], end["seed"]) for end in ends) == [
        ("mezo_bcd", 0),
        ("mezo_bcd", 0),
        ("mezo_bcd", 1),
        ("zero-shot", 0),
    ]
    assert all(0 <= end["test"] <= end["best"] <= 1 for end in ends)
    runs = read(tmp_path / "out" / "runs.csv")
    tuning = {row["lr"]: float(row["dev"]) for row in runs if row["method"] == "mezo_bcd" and row["seed"] == "0"}
    later = next(
        row for row in runs if row["method"] == "mezo_bcd" and row["seed"] == "1" and row["state"] == "finished"
    )
    assert tuning[later["lr"]] == max(tuning.values())
    text = (tmp_path / "out" / "table.md").read_text()
    assert "Missing" not in text
    assert "(n=2)" in text
    folder = tmp_path / "out" / "runs" / later["run"]
    assert (folder / "summary.md").is_file()
    assert (folder / "figures" / "blocks.png").is_file()

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs").glob("*/*")}
    again = zeroblock("sweep", file, "--out", tmp_path / "out", "--data", toys / "data")
    assert again.returncode == 0, again.stderr
    assert "tasks: 1; 4 runs finished, 0 due\n" in again.stdout
    assert "begin" not in again.stdout
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs").glob("*/*")} == before


def test_one_process_at_a_time_makes_a_sweep(toys, tmp_path):
    """Two sweeps in one folder would overwrite each other's tables, and each other's runs would fail."""
    file = tmp_path / "toy.toml"
    file.write_text(f'[run]\nmodel = "{toys / "model"}"\nmethod = "zero-shot"\ndev = 10\ntest = 10\ntask = "sst2"\n')
    words = ["sweep", file, "--out", tmp_path / "out", "--data", toys / "data"]
    with only_writer(tmp_path / "out"):
        result = zeroblock(*words)
        assert zeroblock(*words, "--dry-run").returncode == 0
    assert result.returncode == 2
    assert f"out is being written by process {os.getpid()}: wait for it, or stop it" in result.stderr
    assert not (tmp_path / "out" / "table.md").exists()
    done = zeroblock(*words)
    assert done.returncode == 0, done.stderr


def test_a_failing_run_is_told_and_the_others_go_on(toys, tmp_path):
    file = tmp_path / "toy.toml"
    shape = f'[run]\nmodel = "{toys / "model"}"\nmethod = "zero-shot"\ndev = 10\ntest = 10\n'
    file.write_text(shape + '[grid]\ntask = ["rte", "sst2"]\n')  # there are no data of rte
    process = start(toys, file)
    said, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "fail   rte-zero-shot" in errors
    assert "end    sst2-zero-shot" in said
    missing = (tmp_path / "out" / "table.md").read_text().partition("## Missing")[2]
    assert "- rte-zero-shot" in missing
    assert "train.jsonl" in missing


def test_a_stopped_sweep_goes_on_where_it_was(toys, tmp_path):
    """The finished run is left alone, the begun one continues its journal, whichever way it was stopped."""
    file = sweep_file(toys, tmp_path / "toy.toml", steps=600)
    runs = tmp_path / "out" / "runs"
    less = ("--set", "lr=1e-2", "--set", "seed=0")
    size, done = 0, {}
    for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        process = start(toys, file, *less, ignoring=how == signal.SIGINT)
        until(lambda: len(list(runs.glob("*mezo_bcd*/journal.zbj"))) == 1)
        journal = next(runs.glob("*mezo_bcd*/journal.zbj"))
        size = size or journal.stat().st_size
        until(lambda: journal.stat().st_size > size + 500)  # noqa: B023
        process.send_signal(how)
        said, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == (-how if how == signal.SIGKILL else 128 + how)
        assert "Traceback" not in errors
        assert ("the same command continues" in errors) == (how != signal.SIGKILL)
        until(lambda: _free(journal))  # noqa: B023  # a worker whose sweep was killed stops by itself
        assert not (journal.parent / "summary.json").exists()
        size = journal.stat().st_size
        done = done or {path: path.stat().st_mtime_ns for path in runs.glob("*zero-shot*/*")}
        assert done

    finished = start(toys, file, *less)
    said, errors = finished.communicate(timeout=PATIENCE_S)
    assert finished.returncode == 0, errors
    assert "begin  sst2-zero-shot" not in said
    assert {path: path.stat().st_mtime_ns for path in runs.glob("*zero-shot*/*")} == done
    told = (tmp_path / "out" / "log" / f"{journal.parent.name}.txt").read_text()
    killed, stopped, later = (int(count) for count in re.findall(r"replaying (\d+) of \1 steps", told))
    assert 0 < killed < stopped < later
    assert json.loads((journal.parent / "summary.json").read_text())["steps"] == 600
    assert len(read(journal.parent / "steps.csv")) == 600
    assert "\n2 runs, " in (tmp_path / "out" / "table.md").read_text()


def _free(path: Path) -> bool:
    """Whether no process has a file open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if Path(os.readlink(link)) == path:
                return False
        except OSError:
            continue
    return True


def test_the_death_of_a_process_costs_one_run(toys, tmp_path):
    """A worker that is killed, as by the system when memory runs out, is told of, and the sweep ends in order."""
    file = sweep_file(toys, tmp_path / "toy.toml", steps=4000)
    process = start(toys, file, "--set", "lr=[1e-2]", "--set", "seed=[0]", "--set", "eval_every=4000")
    runs = tmp_path / "out" / "runs"
    until(lambda: bool(list(runs.glob("*mezo_bcd*/journal.zbj"))))
    threads = Path(f"/proc/{process.pid}/task").iterdir()
    workers = [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]
    assert len(workers) == 1
    os.kill(workers[0], signal.SIGKILL)
    said, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "end    sst2-zero-shot" in said
    assert re.search(r"fail   sst2-mezo_bcd-seed0-\w+: its process ended with status -9; see ", errors)


CLOSING_S = 60
"""Seconds after which hands that are not closed together give up, so that the test fails instead of hanging."""


class Slow:
    """A hand whose run takes until it is killed, or until all hands of its crew are being closed."""

    alive = True

    def __init__(self, crew: Slowly) -> None:
        self.crew, self.ended, self.killed = crew, threading.Event(), False
        crew.hands.append(self)

    def make(self, run: Run, folder: Path, log: Path) -> str:
        if len(self.crew.hands) == self.crew.jobs:
            self.crew.busy.set()
        self.ended.wait(CLOSING_S)
        return "ended"

    def stop(self) -> None:
        pass

    def close(self) -> None:
        if not self.ended.is_set():
            self.crew.closing.wait(CLOSING_S)  # for the others
            self.ended.set()

    def kill(self) -> None:
        self.killed = True
        self.ended.set()


class Slowly(Hands):
    def __init__(self, logs: Path, jobs: int, closers: int) -> None:
        super().__init__(jobs, lambda: Slow(self), logs)
        self.hands: list[Slow] = []
        self.busy, self.closing = threading.Event(), threading.Barrier(closers)

    def ready(self) -> list[Run]:
        return [Run(str(number), None, {}) for number in range(self.jobs)]  # type: ignore[arg-type]

    def place(self, run: Run) -> Path:
        return self.logs

    def begun(self, run: Run) -> None:
        pass

    def ended(self, run: Run, error: str) -> None:
        pass


@pytest.mark.parametrize("signals", [1, 2])
def test_runs_are_stopped_together_and_a_second_signal_kills_them(tmp_path, signals):
    """Three hands need to be closed at the same time to end; with a fourth that never comes they have to be killed."""
    crew = Slowly(tmp_path, jobs=3, closers=3 if signals == 1 else 4)

    def interrupt() -> None:
        crew.busy.wait(PATIENCE_S)
        os.kill(os.getpid(), signal.SIGINT)
        if signals == 2:
            until(lambda: crew.closing.n_waiting == 3)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            crew.make()
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
        crew.closing.abort()
    assert [hand.killed for hand in crew.hands] == [signals == 2] * 3
    assert all(hand.ended.is_set() for hand in crew.hands)


def test_what_goes_wrong_in_the_sweep_itself_stops_it(toys, tmp_path):
    """Here the table cannot be written once a run has ended: told at once, and no process is left behind."""
    file = sweep_file(toys, tmp_path / "toy.toml", steps=4000)
    process = start(toys, file, "--jobs", "2", "--set", "seed=0")
    table = tmp_path / "out" / "table.md"
    until(table.exists)
    table.unlink()
    table.mkdir()
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0
    assert "IsADirectoryError" in errors
    until(lambda: all(_free(journal) for journal in (tmp_path / "out").glob("runs/*/journal.zbj")))
