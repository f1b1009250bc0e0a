"""What a run shows: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from zeroblock.evaluate.evaluator import Evaluation
from zeroblock.evaluate.measurement import Measurement
from zeroblock.journal import Record
from zeroblock.report.view import Lines, Live, Meter, Progress, Quiet, View, measurement_line, step_line, view
from zeroblock.train import Config, run


@pytest.fixture
def settings(llama: Path, data: Path) -> Config:
    return Config(
        model=str(llama), task="sst2", data=str(data), lr=1e-3, steps=8, eval_every=4, batch_size=2, device="cpu"
    )


def shown(kind: type[Lines], settings: Config, out: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(kind, "every", 0.0)
    text = io.StringIO()
    run(settings, out, kind(Console(file=text, force_terminal=kind is Live, width=80)))
    return text.getvalue()


def test_lines(settings: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(Lines, settings, tmp_path / "run", monkeypatch)
    assert "\x1b" not in text
    steps = [line for line in text.splitlines() if line.startswith("step 8/8")]
    assert len(steps) == 1
    for word in ("loss 0.", "block model.", "steps/s", "left", "peak"):
        assert word in steps[0]
    measured = [line for line in text.splitlines() if " accuracy " in line]
    assert [line.split("  ")[:1] for line in measured] == [[f"step {s}"] for s in (0, 0, 4, 4, 8, 8)]


def test_live(settings: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(Live, settings, tmp_path / "run", monkeypatch)
    assert "\x1b" in text
    for word in ("training", "8/8", "loss 0.", "block model.", "steps/s", "step 8  test accuracy"):
        assert word in text


@pytest.mark.parametrize("kind", [Lines, Live])
def test_a_run_that_the_clock_ends_shows_the_clock(
    kind: type[Lines], settings: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--steps is a limit that it will not reach."""
    show = kind.show

    def stopping(view: Lines, progress: Progress) -> None:
        show(view, progress)
        if progress.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(kind, "show", stopping)
    timed = settings.replace(lr=None, lr_schedule=None, steps=10**9, eval_every=10**9, max_minutes=60.0)
    text = shown(kind, timed, tmp_path / "run", monkeypatch)
    assert " of 1:00:00" in text
    assert str(10**9) not in text


def test_steps_that_end_before_the_clock_are_counted() -> None:
    soon = Progress(60, 100, 0.5, "b", 2.0, spent=30.0, allowed=60.0)
    assert (soon.where, soon.time, soon.share) == ("60/100", "0:20 left", (60, 100))
    late = Progress(60, 1000, 0.5, "b", 2.0, spent=30.0, allowed=60.0)
    assert (late.where, late.time, late.share) == ("60", "0:30 of 1:00", (30.0, 60.0))


def test_the_view_fits_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(view(quiet=True, json=False)) is Quiet
    plain = view(quiet=False, json=True)
    assert type(plain) is Lines
    assert plain.console.stderr
    monkeypatch.setenv("FORCE_COLOR", "1")  # how rich is step_line that it writes to a terminal
    live: Any = view(quiet=False, json=False)
    assert type(live) is Live
    live.close()


def test_the_meter_smooths_and_counts_no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 100.0, 102.0])
    monkeypatch.setattr("zeroblock.report.view.time.perf_counter", lambda: next(clock))
    meter = Meter(10, ("a", "b"))

    def step(number: int, loss: float) -> Progress:
        return meter.step(Record(number, number % 2, (0.0,), 0.1, (), loss))

    assert step(0, 1.0) == Progress(1, 10, 1.0, "a", 0.0)
    assert step(1, float("nan")) == Progress(2, 10, 1.0, "b", 0.5)
    meter.pause()
    assert step(2, 2.0) == Progress(3, 10, pytest.approx(1.02), "a", 0.5)
    last = step(3, 2.0)
    assert last.rate == pytest.approx(0.5)
    assert last.left == pytest.approx(12)


def test_numbers_in_words() -> None:
    assert (
        step_line(Progress(1, 2, 0.25, "x", 1.0), 25_700_000_000) == "loss 0.2500  block x  1.00 steps/s  peak 25.7 GB"
    )
    found = Evaluation("f1", 0.5, 1.25, 7, 2.0, 0.25)
    assert measurement_line(Measurement(3, "dev", found, 0.0)) == (
        "step 3  dev f1 50.0 %  exact match 25.0 %  loss 1.2500  n 7  2.0 s"
    )


def test_a_replay_in_lines_and_as_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 5.0, 12.0])
    monkeypatch.setattr("zeroblock.report.view.time.monotonic", lambda: next(clock))
    out = io.StringIO()
    lines = Lines(Console(file=out))
    for step in (1, 2, 3):
        lines.replaying(step, 9)
    assert out.getvalue() == "replayed 3/9\n"
    monkeypatch.undo()
    out = io.StringIO()
    live = Live(Console(file=out, force_terminal=True, width=80))
    live.replaying(4, 9)
    live.close()
    assert "replaying" in out.getvalue()
    assert "4/9" in out.getvalue()


def test_every_view_is_one() -> None:
    views: list[View] = [Quiet(), Lines(Console(file=io.StringIO()))]
    assert all(hasattr(one, "close") for one in views)
