"""``zeroblock plan`` and ``zeroblock doctor``: what they say is true of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from run_toy import data, llama, single_thread  # noqa: F401 (fixtures)
from toy import PATIENCE_S
from zeroblock import forecast as forecasts
from zeroblock.cli import app, doctor
from zeroblock.errors import ZeroBlockError
from zeroblock.forecast import Forecast, forecast
from zeroblock.train import Config

GB = 10**9


@pytest.fixture(scope="module")
def config(llama: Path, data: Path) -> Config:  # noqa: F811
    return Config(
        model=str(llama), task="sst2", data=str(data), lr=1e-3, steps=100, batch_size=4, train=30, dev=8, test=8,
        device="cpu",
    )  # fmt: skip


@pytest.fixture(scope="module")
def measured(config: Config) -> Forecast:
    return forecast(config, seconds=0.2)


def test_a_plan_is_measured_on_the_data(measured: Forecast) -> None:
    assert measured.rows == {"train": 30, "dev": 8, "test": 8}
    assert measured.epochs == pytest.approx(100 * 4 / 30)
    assert measured.evaluations == 6
    assert 20 < measured.load.tokens < 400
    timing = measured.timing
    assert timing is not None
    assert timing.steps >= forecasts.MIN_STEPS
    assert measured.steps_s == pytest.approx(100 * timing.step_s)
    assert measured.evaluations_s == pytest.approx(6 * timing.evaluation_s)
    document = json.loads(json.dumps(measured.document()))
    assert document["fits"] is True
    assert document["run_s"] == pytest.approx(measured.steps_s + measured.evaluations_s)


def test_memory_by_method(measured: Forecast) -> None:
    """Adam's moments are two numbers per weight, and 16 bits take half of 32."""
    by_name = {one.method: one for one in measured.memory}
    assert by_name["mezo_adam"].cpu - by_name["mezo"].cpu == 2 * 4 * measured.weights
    assert by_name["mezo_adam"].gpu - by_name["mezo"].gpu == 2 * 2 * measured.weights
    assert by_name["ft"].cpu > 16 * measured.weights
    assert measured.memory[0].method == "mezo_bcd"
    assert measured.expected_bytes >= measured.memory[0].cpu


def test_a_model_that_does_not_fit_is_not_loaded(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasts, "free_memory", lambda device: 1000)
    monkeypatch.setattr(forecasts, "prepare", lambda *_, **__: pytest.fail("it was loaded"))
    found = forecast(config)
    assert (found.fits, found.timing, found.steps_s) == (False, None, None)
    assert "the weights alone take" in found.reason
    assert found.peak_bytes == found.memory[0].cpu
    assert found.document()["run_s"] is None


def test_the_plan_is_one_screen(config: Config) -> None:
    given = ["--model", config.model, "--data", f"{config.data}/sst2/train.jsonl", "--seconds", "0.1"]
    result = CliRunner().invoke(app, ["plan", *given])
    assert isinstance(result.exception, ZeroBlockError), "rows without prompt and completion are no data"
    given = ["--model", config.model, "--task", "sst2", "--data", str(config.data), "--train", "30"]
    result = CliRunner().invoke(app, ["plan", *given, "--dev", "8", "--test", "8", "--seconds", "0.1"])
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) < 25
    for part in ("it fits", "per step", "epochs", "▸ mezo_bcd", "zeroblock train --model"):
        assert part in result.stdout, part
    assert "--lr" not in result.stdout


@pytest.mark.gpu
def test_captures_belong_to_the_run(config: Config) -> None:
    """A capture takes longer than the step that it captures, and happens once per block and shape of a row."""
    found = forecast(config.replace(device="cuda", dtype="auto"), seconds=2.0)
    assert found.timing is not None
    assert found.timing.capture_s > found.timing.step_s
    assert found.steps_s == pytest.approx(100 * found.timing.step_s + found.timing.capture_s)
    assert found.timing.peak_bytes is not None
    assert found.fits


def test_nothing_to_plan_without_steps(config: Config) -> None:
    with pytest.raises(ZeroBlockError, match="takes no steps"):
        forecast(config.replace(method="zero-shot"))


def test_free_memory_is_that_of_the_machine() -> None:
    free = forecasts.free_memory(torch.device("cpu"))
    assert free is None or 0 < free < 100_000 * GB


def test_the_doctor_takes_a_step_and_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert found["works"]
    assert found["devices"][0]["step"].startswith("works")
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in ("peft", "numba") else version(name))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "pip install 'zeroblock[lora]'" in result.stdout
    assert "numba is missing: pip install numba" in result.stdout


@pytest.mark.parametrize("command", ["doctor", "plan"])
def test_help_needs_no_torch(command: str) -> None:
    script = (
        f"import sys, zeroblock.cli as cli\nsys.argv = ['zeroblock', {command!r}, '--help']\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "print('IMPORTED', sorted({'torch', 'transformers', 'numba', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert "Usage" in done.stdout
    assert done.stdout.rstrip().endswith("IMPORTED []")
