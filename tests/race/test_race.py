"""Races: a real one of two methods, and how time, forward passes and choices are counted."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

import here
import run_toy
from toy import zeroblock
from zeroblock.errors import ZeroBlockError
from zeroblock.evaluate.evaluator import Evaluation
from zeroblock.evaluate.measurement import Measurement
from zeroblock.method import METHODS
from zeroblock.race import plan
from zeroblock.race import score as score_module
from zeroblock.race.plan import Entrant, Race, enter, forwards
from zeroblock.race.score import Score, band, first_to
from zeroblock.race.table import standings
from zeroblock.report.view import Progress, Quiet
from zeroblock.sweep import clock as clocks
from zeroblock.sweep.clock import CLOCK, Clock, Pace, read
from zeroblock.sweep.plan import Run
from zeroblock.train.config import Config


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_race_from_the_lap_to_the_figure_and_one_more_seed(tmp_path, monkeypatch):
    monkeypatch.setattr("zeroblock.cli.race.hiring", here.hiring)
    monkeypatch.setattr(plan, "MIN_LAP_S", 0.3)
    monkeypatch.setattr(score_module, "SLACK", 1e9)  # on a busy machine every evaluation of so short a race is late
    run_toy.save_model(tmp_path / "model")
    run_toy.save_sst2(tmp_path / "data")
    words = ["race", "--model", tmp_path / "model", "--task", "sst2", "--data", tmp_path / "data", "--batch-size", 4]
    words += ["--train", 20, "--dev", 10, "--test", 10, "--methods", "mezo_bcd,ft", "--lr", "1e-3,1e-2"]
    words += ["--max-minutes", 0.004, "--evals", 2, "--out", tmp_path / "out", "--set", "mezo_bcd.clip=9.0"]
    ran = zeroblock(*words, "--seeds", 1)
    assert ran.returncode == 0, ran.stderr
    state = json.loads((tmp_path / "out" / "race.json").read_text())["methods"]
    tries = {
        path.parent.name: json.loads(path.read_text())
        for path in (tmp_path / "out" / "runs").glob("*-lr*/summary.json")
    }
    assert len(tries) == 4
    for method, one in state.items():
        mine = [run for run in tries.values() if run["method"] == method]
        best = max(mine, key=lambda run: (run["dev"]["value"], -run["dev"]["loss"]))
        assert one["lr"] == best["lr"]
        assert {run["steps"] for run in mine} == {one["try"][0]}

    runners = rows(tmp_path / "out" / "runners.csv")
    assert [(row["method"], row["seed"]) for row in runners] == [("mezo_bcd", "0"), ("ft", "0")]
    for row in runners:
        each = {"mezo_bcd": 2, "ft": 3}[row["method"]]
        assert int(row["forwards"]) == each * int(row["steps"])
        assert float(row["seconds"]) > 0
        assert float(row["lr"]) == state[row["method"]]["lr"]
    assert {row["method"] for row in rows(tmp_path / "out" / "race.csv")} == {"mezo_bcd", "ft"}
    config = next((tmp_path / "out" / "runs").glob("*mezo_bcd-seed0*")) / "config.toml"
    assert "clip = 9.0" in config.read_text()
    assert (tmp_path / "out" / "race.png").read_bytes().startswith(b"\x89PNG")
    assert "mezo_bcd" in (tmp_path / "out" / "race.md").read_text()
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()

    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs").glob("*/summary.json")}
    more = zeroblock(*words, "--seeds", 2)  # the runners that were there are not made again
    assert more.returncode == 0, more.stderr
    told = [line for line in more.stdout.splitlines() if line.startswith(("pace", "begin"))]
    assert len(told) == 2
    assert all(line.startswith("begin") and "seed1" in line for line in told)
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert len(rows(tmp_path / "out" / "runners.csv")) == 4

    other = zeroblock(*[0.5 if word == 0.004 else word for word in words])
    assert other.returncode == 2
    assert "holds another race (minutes 0.004, not 0.5): give another --out" in other.stderr


def progress(step: int) -> Progress:
    return Progress(step, 100, 0.5, "b", 1.0)


def test_the_clock_leaves_out_evaluations_and_goes_on_after_a_kill(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: now)
    path = tmp_path / CLOCK
    clock = Clock(Quiet(), path)
    for step in (1, 2, 3):  # the first step compiles, and is not timed
        now += 10.0
        clock.step(progress(step))
    now += 1.0
    clock.evaluating(3, "dev", 0, 10)
    now += 50.0
    clock.measured(Measurement(3, "dev", Evaluation("accuracy", 0.5, 0.7, 10, 50.0), 0.0))
    now += 2.0
    clock.step(progress(4))
    assert read(path) == [(1, 0.0), (2, 10.0), (3, 20.0), (4, 22.0)]

    again = Clock(Quiet(), path)  # the journal lost step 4
    again.replaying(3, 3)
    for step in (4, 5):
        now += 7.0
        again.step(progress(step))
    again.close()
    assert read(path) == [(1, 0.0), (2, 10.0), (3, 20.0), (4, 20.0), (5, 27.0)]


def scored(folder: Path, seconds: list[float], losses: list[float], values: list[float], tests: list[float]) -> Score:
    """The score of a folder that a run of ``mezo`` would have left, with 10 s to train."""
    folder.mkdir()
    config = Config(model="m", task="sst2", method="mezo", lr=1e-3, steps=100)
    lines = []
    for number, (loss, value, test) in enumerate(zip(losses, values, tests, strict=True)):
        for split, result in (("dev", value), ("test", test)):
            evaluation = Evaluation("accuracy", result, loss, 10, 1.0)
            lines.append(json.dumps(Measurement(10 * number, split, evaluation, 0.0).line()) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    clock = "".join(f"{10 * n},{s}\n" for n, s in enumerate(seconds) if n)
    (folder / CLOCK).write_text("step,seconds\n" + clock)
    score = Score.read(Run("mezo-0", config, {}), folder, limit=10.0)
    assert score is not None
    return score


def test_dev_selects_within_the_time_and_test_only_reports(tmp_path):
    score = scored(
        tmp_path / "run",
        seconds=[0.0, 4.0, 8.0, 12.0],
        losses=[0.1, 0.6, 0.5, 0.2],  # the last came too late, the first is before training
        values=[0.9, 0.5, 0.6, 0.8],
        tests=[0.9, 1.0, 0.3, 0.7],
    )
    assert score.best is not None
    assert (score.best.step, score.best.forwards, score.best.seconds) == (20, 40, 8.0)
    assert score.test == 0.3
    assert [point.step for point in score.points] == [0, 10, 20]
    assert score.evaluating == 8.0
    assert first_to([score], 0.55, "seconds") == [8.0]
    assert first_to([score], 0.4, "forwards") == []


def test_bands_average_over_seconds_that_all_seeds_reached(tmp_path):
    same = {"values": [0.0, 0.5, 1.0], "tests": [0.5] * 3}
    first = scored(tmp_path / "a", [0.0, 5.0, 10.0], [1.0, 0.5, 0.0], **same)
    second = scored(tmp_path / "b", [0.0, 4.0, 8.0], [3.0, 2.5, 2.0], **same)
    curve = band([first, second], "seconds", "loss")
    assert curve is not None
    assert list(curve.x) == [0.0, 5.0, 8.0]
    assert curve.mean == pytest.approx([2.0, (0.5 + 2.375) / 2, (0.2 + 2.0) / 2])
    assert curve.spread[0] == pytest.approx(math.sqrt(2.0))
    ranked = standings({"mezo": [first], "lozo": [second]})
    assert {one.method: one.to_seconds.count for one in ranked} == {"mezo": 1, "lozo": 0}
    diverged = scored(tmp_path / "c", [0.0, 4.0, 8.0], [1.0, math.nan, math.nan], **same)
    assert band([diverged], "seconds", "loss") is None


def test_pace_plans_the_steps_and_leaves_turns_whole():
    race = Race({"model": "m", "task": "sst2"}, enter(["mezo", "lozo", "ft"], ["1e-6,1e-5,1e-4"], {}), minutes=1.0)
    pace = Pace.of([(n, 5.0 + n / 10) for n in range(1, 400)])
    assert pace == Pace(5.0, pytest.approx(10.0))
    mezo, lozo, ft = race.entrants
    assert race.length(mezo, pace, 1.0, 8) == plan.Length(544, 68)
    assert race.length(lozo, pace, 1.0, 8) == plan.Length(400, 50)  # its turns have 50 steps
    assert len(ft.lrs) == 3
    assert race.tries({one.method: plan.Length(10, 5) for one in race.entrants}).rows == ["mezo", "lozo", "ft"]
    finals = race.finals({"mezo": plan.Length(8, 1)}, {"mezo": 1e-5})
    assert [(run.config.seed, run.config.data_seed) for run in finals.runs.values()] == [(0, 0), (1, 1), (2, 2)]


def test_every_method_can_race_and_its_forward_passes_are_its_points():
    for name in METHODS:
        race = Race({"model": "m", "task": "sst2"}, (Entrant(name, (1e-4,)),))
        assert forwards(race.lap(race.entrants[0]).config) >= 2
    assert forwards(Config(model="m", task="sst2", method="mezo_bcd", lr=1e-4, accumulate=3)) == 6


def test_settings_that_the_race_decides_are_refused():
    with pytest.raises(ZeroBlockError, match="the race itself decides steps: leave it out of --set"):
        Race({"model": "m", "task": "sst2"}, (Entrant("mezo", (1e-4,), {"steps": 5}),))
    with pytest.raises(ZeroBlockError, match="mezo takes no rank"):
        Race({"model": "m", "task": "sst2"}, (Entrant("mezo", (1e-4,), {"rank": 5}),))


@pytest.mark.parametrize(
    ("methods", "lrs", "says"),
    [
        (["mezzo"], ["1e-4"], "unknown method 'mezzo'; did you mean 'mezo'?"),
        (["mezo"], [], "mezo needs learning rates to try"),
        (["mezo", "ft"], ["1e-4,1e-3", "ft=1e-5"], "the same number of learning rates: ft has 1, others have 2"),
        (["mezo"], ["lozo=1e-4"], "unknown method in --lr: 'lozo'"),
        (["mezo"], ["1e-4;1e-3"], "write numbers with commas"),
        (["mezo", "mezo"], ["1e-4"], "names a method twice"),
    ],
)
def test_mistakes_are_named_before_anything_runs(methods, lrs, says):
    with pytest.raises(ZeroBlockError) as error:
        enter(methods, lrs, {})
    assert says in str(error.value)
