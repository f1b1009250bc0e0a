"""Races: a real one from the tries to the page, and how time, forward passes and choices are counted."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import importlib.util
import itertools
import json
import math
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import here
import run_toy
from toy import zeroblock
from zeroblock.errors import ZeroBlockError
from zeroblock.evaluate.evaluator import Evaluation
from zeroblock.evaluate.measurement import Measurement
from zeroblock.lock import only_writer
from zeroblock.method import METHODS
from zeroblock.race import runner
from zeroblock.race.course import Course
from zeroblock.race.plan import Entrant, Race, enter
from zeroblock.race.score import Point, Score, band, first_to, loss_at
from zeroblock.race.table import cells, markdown, notes, standings
from zeroblock.report.view import Progress, Quiet
from zeroblock.sweep import clock as clocks
from zeroblock.sweep.clock import CLOCK, Clock, read
from zeroblock.sweep.plan import Run
from zeroblock.sweep.worker import job_of
from zeroblock.train import cache
from zeroblock.train.cache import caching
from zeroblock.train.config import Config
from zeroblock.train.workload import prepare, resolve

ROOT = Path(__file__).parents[2]


class Heats(here.Here):
    """A hand that makes heats in this process."""

    def make(self, run: Run, folder: Path, log: Path) -> str:
        try:
            return runner.make(job_of(run, folder, log))
        except ZeroBlockError as error:
            return str(error)


@contextlib.contextmanager
def hiring(*words: Any) -> Iterator[tuple[int, type[Heats]]]:
    yield 1, Heats


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("race")
    run_toy.save_model(folder / "model")
    run_toy.save_sst2(folder / "data")
    return folder


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_race_from_the_tries_to_the_page_and_one_more_entrant(toys, tmp_path, monkeypatch):
    monkeypatch.setattr("zeroblock.cli.race.hiring", hiring)
    out = tmp_path / "smollm2" / "sst2"
    words = ["race", "--model", toys / "model", "--task", "sst2", "--data", toys / "data", "--batch-size", 4]
    words += ["--train", 20, "--dev", 10, "--test", 10, "--max-minutes", 0.001, "--evals", 2, "--out", out]
    first = [*words, "--methods", "zero-shot,mezo,bad=mezo", "--set", "bad.freeze=nothing", "--lr", "bad=auto"]
    first += ["--lr", "mezo=auto,1e-3,1e-2"]
    drawing = sys.modules.get("matplotlib")
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # the report draws the figure
    ran = zeroblock(*first, "--seeds", 1)
    assert ran.returncode == 1, ran.stderr  # one entrant cannot run
    assert "fail   sst2-run-bad-auto-seed0: freeze: no parameter is called 'nothing'" in ran.stderr

    heats = {line["heat"]: line for line in map(json.loads, (out / "heats.jsonl").read_text().splitlines())}
    tries = [line for line in heats.values() if line["kind"] == "try"]
    assert sorted(line["lr"] for line in tries) == [1e-3, 1e-2]
    assert all(line["test"] is None for line in tries)
    best = min(tries, key=lambda line: line["dev_loss"])
    runners = {row["entrant"]: row for row in rows(out / "runners.csv")}
    assert set(runners) == {"zero-shot", "mezo", "mezo auto"}
    assert float(runners["mezo"]["lr"]) == best["lr"]
    assert runners["mezo auto"]["lr"] == "auto"
    for name in ("mezo", "mezo auto"):
        assert int(runners[name]["forwards"]) == 2 * int(runners[name]["steps"]) > 0
        assert float(runners[name]["seconds"]) >= 0.06
    assert "bad auto: 1 of 1 runners to go" in (out / "race.md").read_text()

    before = (out / "race.json").read_bytes()
    dry = zeroblock(*first, "--seeds", 2, "--dry-run")  # of ten heats five are done; the one that failed is tried again
    assert "sst2: 5 heats left" in dry.stdout
    assert "5 are done" in dry.stdout
    assert (out / "race.json").read_bytes() == before

    more = zeroblock(*words, "--methods", "ft", "--lr", "ft=1e-4", "--seeds", 1)  # joins; the others are kept
    assert [line.split()[1].rstrip(":") for line in more.stdout.splitlines() if line.startswith("end")] == [
        "sst2-run-ft-lr1e-4-seed0"
    ]
    assert {row["entrant"] for row in rows(out / "runners.csv")} == {"zero-shot", "mezo", "mezo auto", "ft"}
    commands = json.loads((out / "race.json").read_text())["command"].splitlines()
    assert ["--methods ft" in line for line in commands] == [False, True]
    assert "no figure" in more.stderr
    monkeypatch.delitem(sys.modules, "matplotlib")
    if drawing is not None:
        sys.modules["matplotlib"] = drawing
    assert zeroblock("report", out).returncode == 0
    assert "<svg" in (out / "report.html").read_text()
    other = zeroblock(*[0.5 if word == 0.001 else word for word in first])
    assert other.returncode == 2
    assert "holds another race (minutes 0.001, not 0.5): give another --out" in other.stderr

    spec = importlib.util.spec_from_file_location("race_page", ROOT / "results" / "race" / "page.py")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    (tmp_path / "docs").mkdir()
    text = (ROOT / "docs" / "race.md").read_text()
    (tmp_path / "docs" / "race.md").write_text(text)
    monkeypatch.setattr("sys.argv", ["page.py", "--rows", str(tmp_path), "--docs", str(tmp_path / "docs")])
    page.main()
    made = (tmp_path / "docs" / "race.md").read_text()
    assert "| mezo auto | auto |" in made
    assert (tmp_path / "docs" / "images" / "race-smollm2-sst2.svg").is_file()
    assert page.filled(made, "claims", []) != made != page.filled(made, "steps", ["new"])  # the marks are still there


def heat_of(toys: Path, monkeypatch: pytest.MonkeyPatch, evals: int = 3, **given: Any) -> tuple[runner.Heat, list[Any]]:
    """A heat of 0.2 s, and the weights at every evaluation, by split."""
    fields = {
        "model": str(toys / "model"),
        "task": "sst2",
        "data": str(toys / "data"),
        "batch_size": 4,
        "device": "cpu",
    }
    config = resolve(Config.of({**fields, "train": 20, "dev": 10, "test": 10, "eval_every": 50, **given}))
    monkeypatch.setattr(runner, "_held", {})
    ticks = itertools.count()
    monkeypatch.setattr(runner, "time", types.SimpleNamespace(perf_counter=lambda: next(ticks) / 200))
    heat = runner.Heat(prepare(config), 0.2, evals)
    seen: list[Any] = []
    evaluate = heat._evaluate

    def noted(split: str) -> Evaluation:
        weights = torch.cat([param.detach().flatten().clone() for param in heat.work.model.parameters()])
        result = evaluate(split)
        seen.append((split, heat.steps, weights))
        # the second evaluation after training has the lowest loss
        loss = {1: 9.0, 2: 0.5, 3: 0.1}.get(len(seen), 0.9)
        return Evaluation(result.metric, result.value, loss, result.n, result.seconds)

    monkeypatch.setattr(heat, "_evaluate", noted)
    return heat, seen


@pytest.mark.parametrize("large", [False, True])
def test_test_is_measured_once_with_the_weights_that_dev_selected(toys, monkeypatch, large):
    if large:  # the weights are kept in host memory, where those of a model on the CPU are already
        monkeypatch.setattr(cache, "MAX_CACHED_BYTES", 0)
    heat, seen = heat_of(toys, monkeypatch, method="mezo_bcd", lr=1e-2)
    result = heat.run(tests=True)
    assert [split for split, *_ in seen] == ["dev"] * 4 + ["test"]
    assert result["selected"] == seen[2][1] == result["points"][2]["step"]
    assert torch.equal(seen[-1][2], seen[2][2])
    assert not torch.equal(seen[-1][2], seen[3][2])
    assert result["points"][1]["seconds"] >= 0.2 / 3
    assert heat.learner is not None
    assert 0 < result["steps"] < heat.learner.steps  # those of the warm-up are not counted
    assert result["forwards"] == 2 * result["steps"] == result["points"][-1]["forwards"]


@pytest.mark.filterwarnings("ignore:the loss of step .* is not finite")
@pytest.mark.parametrize("method", ["mezo", "lozo", "ft"])
def test_a_runner_that_diverges_keeps_what_dev_selected_before(toys, monkeypatch, method):
    """Its result is as good as its weights were, and its last evaluation shows that it diverged."""
    heat, seen = heat_of(toys, monkeypatch, evals=4, method=method, lr=1e-3)
    heat.limit = 8.0  # of ticks, enough for twenty steps in a row
    step = heat._step

    def ruined(lr: float) -> None:
        step(lr)
        if len(seen) == 3:
            with torch.no_grad():
                for param in heat.work.model.parameters():
                    param.fill_(math.nan)

    monkeypatch.setattr(heat, "_step", ruined)
    result = heat.run(tests=True)
    assert [split for split, *_ in seen] == ["dev"] * 4 + ["test"]  # before, twice, and where it diverged
    assert result["selected"] == seen[2][1]
    assert torch.equal(seen[-1][2], seen[2][2])
    assert seen[-1][2].isfinite().all()
    assert heat.seconds < heat.limit
    last = result["points"][-1]
    assert last["step"] == result["steps"] >= result["selected"]
    assert seen[3][2].isnan().any()


def test_between_two_folds_only_the_end_is_measured(toys, monkeypatch):
    """An estimate of the clock that is too late once must not end a fold that steps are still to follow."""
    heat, _ = heat_of(toys, monkeypatch, evals=4, method="lozo", lr=1e-3, fold=5)
    assert heat.optimizer is not None
    known, calls = heat._now, itertools.count()
    monkeypatch.setattr(heat, "_now", lambda begin: known(begin) if next(calls) != 1 else heat.limit)
    result = heat.run(tests=False)
    assert heat.seconds >= heat.limit
    *between, last = [heat._warm_up_steps + point["step"] for point in result["points"][1:]]
    assert between
    assert all(step % 5 == 0 for step in between)
    assert last == heat.optimizer.steps
    assert result["points"][-1]["step"] == result["steps"] > 1


def test_without_a_learning_rate_the_steps_spend_the_budget_after_a_warm_up_that_moves_nothing(toys, monkeypatch):
    heat, _ = heat_of(toys, monkeypatch, method="mezo_bcd")
    assert heat.learner is not None
    lrs: list[float] = []
    step = heat.learner.step
    monkeypatch.setattr(heat.learner, "step", lambda objectives, lr: (lrs.append(lr), step(objectives, lr)))
    start = torch.cat([param.detach().flatten().clone() for param in heat.work.model.parameters()])
    heat._warm_up()
    assert set(lrs) == {0.0}
    assert torch.equal(start, torch.cat([param.detach().flatten() for param in heat.work.model.parameters()]))
    heat._train(heat.limit)
    taken = lrs[lrs.index(next(lr for lr in lrs if lr)) :]
    assert sum(lr * lr for lr in taken) <= 0.05**2 * len(heat.learner.blocks) * 1.001
    assert taken[-1] < taken[0]


def test_a_heat_reuses_the_model_and_the_data_of_the_last_with_base_weights(toys, monkeypatch):
    monkeypatch.setattr(runner, "_held", {})
    fields = {"model": str(toys / "model"), "task": "sst2", "data": str(toys / "data"), "device": "cpu"}
    fields |= {"train": 20, "dev": 10, "test": 10}
    with caching():
        first = runner._workload(resolve(Config.of({**fields, "method": "mezo", "lr": 1e-3, "seed": 1})))
        base = next(first.model.parameters()).detach().clone()
        with torch.no_grad():
            next(first.model.parameters()).zero_()
        second = runner._workload(resolve(Config.of({**fields, "method": "lozo"})))
        assert second.model is first.model
        assert second.train is first.train
        assert second.config.method == "lozo"
        assert torch.equal(next(second.model.parameters()), base)
        third = runner._workload(resolve(Config.of({**fields, "method": "lozo", "data_seed": 1})))
        assert third.train is not first.train


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


@pytest.mark.parametrize(
    "damaged", [b"4,", b"4", b"4,\xff\xfe", b"x,30.0", b"2,30.0", b"4,nan", b"4,19.0", b"4,inf", b"\x00"]
)
def test_a_damaged_row_of_the_clock_costs_only_the_rows_from_there_on(damaged, tmp_path):
    path = tmp_path / CLOCK
    path.write_bytes(b"step,seconds\n1,0.0\n2,10.0\n3,20.0\n" + damaged + b"\n5,40.0\n")
    assert read(path) == [(1, 0.0), (2, 10.0), (3, 20.0)]


def scored(seconds: list[float], losses: list[float], test: float = 0.5) -> Score:
    """The score of a heat with ten steps, of two forward passes each, between two evaluations."""
    points = tuple(Point(10 * n, 20 * n, s, 0.5, loss) for n, (s, loss) in enumerate(zip(seconds, losses, strict=True)))
    best = min(points[1:], key=lambda point: point.loss)
    end = points[-1]
    return Score("mezo", "mezo", 1e-3, 0, points, best, test, "accuracy", "accuracy", (9, 9), end.step, end.forwards,
                 end.seconds, 1.0, {})  # fmt: skip


def test_bands_average_over_seconds_that_all_seeds_reached():
    first, second = scored([0.0, 5.0, 10.0], [1.0, 0.5, 0.0]), scored([0.0, 4.0, 8.0], [3.0, 2.5, 2.0])
    curve = band([first, second], "seconds", "loss")
    assert curve is not None
    assert list(curve.x) == [0.0, 5.0, 8.0]
    assert curve.mean == pytest.approx([2.0, (0.5 + 2.375) / 2, (0.2 + 2.0) / 2])
    assert curve.spread[0] == pytest.approx(math.sqrt(2.0))
    assert first_to([first], {0: 0.6}, "seconds") == [5.0]
    assert loss_at(first, 30) == pytest.approx(0.25)
    assert math.isnan(loss_at(first, 41))
    longer = scored([0.0, 4.0, 8.0, 12.0], [3.0, 2.5, 2.0, 1.0], test=0.9)
    ranked = standings({"mezo": [first], "lozo": [longer]})
    assert [one.entrant for one in ranked] == ["lozo", "mezo"]
    assert {one.entrant: one.to_seconds.count for one in ranked} == {"mezo": 1, "lozo": 0}
    assert {one.entrant: one.loss_at_passes.value for one in ranked} == {"mezo": 0.0, "lozo": 2.0}  # at 40 passes
    slow = scored([0.0, 9.0], [3.0, 2.5])  # 20 passes in all
    third = {one.entrant: one for one in standings({"mezo": [first], "lozo": [longer], "zo_muon": [slow]})}
    assert {name: one.passes for name, one in third.items()} == {"mezo": 40, "lozo": 40, "zo_muon": 40}
    assert third["zo_muon"].loss_at_passes.count == 0
    assert standings({"mezo": [first, slow], "lozo": [longer]})[1].loss_at_passes.count == 2  # at 20 passes
    assert math.isnan(loss_at(first, 10))  # before the first evaluation
    lost = scored([0.0, 4.0, 8.0], [1.0, math.nan, math.nan])
    assert band([lost], "seconds", "loss") is None
    assert cells(standings({"mezo": [lost, first]})[0])[4] == "–"  # a seed that diverged stops no table


def test_a_line_that_a_kill_cut_short_is_run_again(tmp_path):
    race = Race({"model": "m", "task": "sst2"}, enter(["mezo"], [], {}), seeds=1)
    Course(race, tmp_path).save()
    (tmp_path / "heats.jsonl").write_text('{"heat": "sst2-run-mezo-au')
    again = Course(race, tmp_path)
    assert [heat.name for heat in again.heats()] == ["sst2-run-mezo-auto-seed0"]
    assert (tmp_path / "heats.jsonl").read_text()  # whoever only looks changes nothing
    again.save()
    assert (tmp_path / "heats.jsonl").read_text() == ""
    with pytest.raises(ZeroBlockError, match=r"mezo auto has other learning rates or settings"):
        Course(Race({"model": "m", "task": "sst2"}, enter(["mezo"], [], {"mezo": {"probes": 2}})), tmp_path)


def test_a_race_of_the_older_kind_is_refused_and_kept(tmp_path):
    older = '{"asked": {"minutes": 1.0}, "methods": {"mezo": {"lr": 0.001}}}'
    (tmp_path / "race.json").write_text(older)
    race = Race({"model": "m", "task": "sst2"}, enter(["mezo"], [], {}))
    for touch in (lambda: Course(race, tmp_path), lambda: Course.open(tmp_path)):
        with pytest.raises(ZeroBlockError, match=r"a race of an older zeroblock.*give another --out"):
            touch()
    assert (tmp_path / "race.json").read_text() == older


@pytest.mark.parametrize(("objective", "lr"), [("loss", 1e-4), ("accuracy", 1e-3)])
def test_dev_chooses_the_learning_rate_by_what_selects_the_weights(tmp_path, objective, lr):
    race = Race({"model": "m", "task": "sst2", "objective": objective}, enter(["mezo"], ["1e-3,1e-4,1e-2"], {}))
    course = Course(race, tmp_path)
    entrant = race.entrants[0]
    for heat, loss, dev in zip(race.tries(entrant), (0.6, 0.5, math.nan), (0.9, 0.8, 0.5), strict=True):
        point = Point(10, 20, 1.0, dev, loss)
        course.done[heat.name] = dataclasses.replace(scored([0.0, 1.0], [1.0, 1.0]), lr=heat.config.lr, best=point)
    assert course.chosen(entrant) == (lr,)


def test_a_runner_that_trained_for_too_long_is_named(tmp_path):
    race = Race({"model": "m", "task": "sst2"}, (Entrant("mezo", "mezo", (1e-3,)),), seeds=2, minutes=0.2)
    course = Course(race, tmp_path)
    for seed, seconds in enumerate((12.1, 26.8)):
        score = dataclasses.replace(scored([0.0, seconds], [1.0, 0.5]), seed=seed)
        course.done[race.run(race.entrants[0], 1e-3, seed).name] = score
    assert notes(course) == ["mezo, seed 1: trained for 26.8 s, not 12 s"]


def test_an_eps_that_bf16_does_not_resolve_is_noted_once(toys, monkeypatch, tmp_path):
    """With the toy's weights of 0.1, an eps of 1e-4 is 0.1 %; without a learning rate, eps fits the weights."""
    race = Race({"model": "m", "task": "sst2"}, (Entrant("wide", "mezo_bcd", (1e-3,)),), seeds=2)
    course = Course(race, tmp_path)
    for change in ({}, {"dtype": "fp32"}, {"eps": 2e-3}, {"lr": None, "eps": None}, {"method": "mezo"}):
        settings = {"method": "mezo_bcd", "lr": 1e-3, "eps": 1e-4, "dtype": "bf16", **change}
        heat, _ = heat_of(toys, monkeypatch, **{name: value for name, value in settings.items() if value is not None})
        assert bool(heat.caution) == (not change)
        if not change:
            for seed in range(2):
                score = scored([0.0, 1.0], [1.0, 0.5])
                score = dataclasses.replace(score, entrant="wide", seed=seed, caution=heat.caution)
                course.done[race.run(race.entrants[0], 1e-3, seed).name] = score
    (note,) = notes(course)
    assert note.startswith("wide: eps 0.0001 is 0.1% of the weights' size, too small a distance for losses in bf16")
    assert note.endswith("race NAME=mezo_bcd with --set NAME.eps=0.004, or all methods with --dtype fp32")


def test_one_process_at_a_time_runs_a_race(toys, tmp_path, monkeypatch):
    monkeypatch.setattr("zeroblock.cli.race.hiring", hiring)
    words = ["race", "--model", toys / "model", "--task", "sst2", "--data", toys / "data", "--methods", "zero-shot"]
    words += ["--train", 20, "--dev", 10, "--test", 10, "--max-minutes", 0.001, "--out", tmp_path / "race"]
    with only_writer(tmp_path / "race"):
        result = zeroblock(*words)
    assert result.returncode == 2
    assert f"race is being written by process {os.getpid()}: wait for it, or stop it" in result.stderr
    assert not (tmp_path / "race" / "race.json").exists()
    assert zeroblock(*words, "--dry-run").returncode == 0
    assert zeroblock(*words).returncode == 0


def test_a_heat_without_memory_names_options_of_the_race_and_is_made_again(toys, tmp_path, monkeypatch):
    monkeypatch.setattr("zeroblock.cli.race.hiring", hiring)
    words = ["race", "--model", toys / "model", "--task", "sst2", "--data", toys / "data", "--methods", "zero-shot"]
    words += ["--train", 20, "--dev", 10, "--test", 10, "--max-minutes", 0.001, "--seeds", 1]
    words += ["--out", tmp_path / "race"]

    def exhausted(heat: runner.Heat, tests: bool) -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(runner.Heat, "run", exhausted)
        result = zeroblock(*words)
    assert result.returncode == 1
    assert "out of memory: the same command tries this heat again" in " ".join(result.stderr.split())
    options = zeroblock("race", "--help").stdout
    assert all(word in options for word in ("--jobs", "--set"))
    assert zeroblock(*words).returncode == 0
    assert len(rows(tmp_path / "race" / "runners.csv")) == 1


def test_runs_that_diverged_do_not_flatter_their_entrant():
    """A loss after the last finite evaluation is not known, and a mean with an unknown test is not, either."""
    fine = scored([0.0, 1.0, 2.0, 3.0], [1.0, 0.8, 0.75, 0.7])
    lost = dataclasses.replace(
        scored([0.0, 1.0, 2.0, 3.0], [1.0, 0.5, math.nan, math.nan]), entrant="lost", test=math.nan
    )
    passes = fine.points[2].forwards
    assert loss_at(fine, passes) == 0.75
    assert math.isnan(loss_at(lost, passes))
    again = dataclasses.replace(lost, test=0.9, seed=1)
    names = [one.entrant for one in standings({"lost": [lost, again], "fine": [fine]})]
    assert names == ["fine", "lost"]
    assert cells(standings({"lost": [lost, again]})[0])[2] == "–"


@pytest.mark.parametrize("result", ["", "{", "[]", '{"entrant": "mezo"}'])
def test_a_heat_whose_result_cannot_be_read_has_failed(tmp_path, result):
    race = Race({"model": "m", "task": "sst2"}, (Entrant("mezo", "mezo", (1e-3,)),), seeds=1)
    course = Course(race, tmp_path)
    heat = race.run(race.entrants[0], 1e-3, 0)
    course.place(heat).write_text(result)
    assert course.end(heat, "") is None
    assert course.failed[heat.name].startswith("its result cannot be read")
    assert not course.place(heat).exists()
    assert Course.open(tmp_path).failed == course.failed


def test_a_try_that_failed_but_did_not_diverge_leaves_the_choice_open(tmp_path):
    """It might have been the best; only a learning rate with which the loss is not finite has lost."""
    race = Race({"model": "m", "task": "sst2"}, enter(["mezo"], ["1e-4,1e-3,1e-2"], {}), seeds=2)
    (mezo,), course = race.entrants, Course(race, tmp_path)
    fine, failed, lost = race.tries(mezo)
    course.done[fine.name] = dataclasses.replace(scored([0.0, 1.0], [1.0, 0.9]), lr=1e-4)
    course.done[lost.name] = dataclasses.replace(scored([0.0, 1.0], [1.0, math.nan]), lr=1e-2)
    course.failed[failed.name] = "out of memory"
    assert course.chosen(mezo) is None
    assert not list(course.left())
    assert not course.hopeless(mezo)
    assert "mezo: 2 of 2 runners to go" in notes(course)
    assert [heat.name for heat in Course(race, tmp_path / "again").heats()][1] == failed.name  # it is made again
    course.failed[failed.name] = "the loss was not finite for 20 steps in a row, the last being step 20: lower lr"
    assert course.chosen(mezo) == (1e-4,)
    assert len(list(course.left())) == 2
    course.done[fine.name] = dataclasses.replace(course.done[lost.name], lr=1e-4)
    assert course.chosen(mezo) is None
    assert course.hopeless(mezo)
    assert not list(course.left())
    assert "mezo: with every learning rate that it tried, the loss stopped being finite" in notes(course)


def test_a_mean_over_fewer_seeds_says_so():
    there, never = scored([0.0, 1.0], [1.0, 0.5]), scored([0.0, 1.0], [1.0, 0.9])
    mezo = [dataclasses.replace(there, seed=seed) for seed in range(3)]
    lozo = [dataclasses.replace(there, entrant="lozo"), dataclasses.replace(never, entrant="lozo", seed=1)]
    ranked = {one.entrant: cells(one, 3) for one in standings({"mezo": mezo, "lozo": lozo})}
    assert not any("seeds" in cell for cell in ranked["mezo"])
    assert all(ranked["lozo"][at].endswith("(2 of 3 seeds)") for at in (2, 3, 4))
    assert all(ranked["lozo"][at].endswith("(1 of 3 seeds)") for at in (9, 10))


def test_heats_of_one_name_and_steps_that_would_fall_otherwise_are_refused():
    with pytest.raises(ZeroBlockError, match="two heats would be called sst2-run-mezo-auto-seed0"):
        Race({"model": "m", "task": "sst2"}, enter(["mezo", "mezo-auto=zero-shot"], ["auto"], {}))
    with pytest.raises(ZeroBlockError, match=r"mezo auto: without a learning rate .* leave lr_schedule constant out"):
        Race({"model": "m", "task": "sst2", "lr_schedule": "constant"}, enter(["mezo"], ["auto,1e-3"], {}))
    Race({"model": "m", "task": "sst2", "lr_schedule": "linear"}, enter(["mezo", "ft"], ["auto,1e-3"], {}))
    Race({"model": "m", "task": "sst2", "lr_schedule": "constant"}, enter(["mezo", "zo_muon"], ["1e-3"], {}))


def test_two_tasks_of_one_name_and_a_folder_of_several_races(tmp_path):
    ran = zeroblock("race", "--model", "m", "--task", "sst2,sst2", "--dry-run")
    assert ran.returncode == 2
    assert "--task names sst2 twice" in ran.stderr
    (tmp_path / "rte").mkdir()
    (tmp_path / "rte" / "race.json").write_text("{}")
    assert f"one race per task: name one, as in {tmp_path / 'rte'}" in zeroblock("report", tmp_path).stderr


def test_every_method_can_race_without_a_learning_rate():
    race = Race({"model": "m", "task": "sst2"}, enter(list(METHODS), [], {}))
    assert len(race.entrants) == len(METHODS)
    assert all(entrant.lrs == (None,) for entrant in race.entrants)


def test_settings_that_the_race_decides_are_refused():
    with pytest.raises(ZeroBlockError, match="the race itself decides steps: leave it out of --set"):
        Race({"model": "m", "task": "sst2"}, (Entrant("mezo", "mezo", (1e-4,), {"steps": 5}),))
    with pytest.raises(ZeroBlockError, match=r"lr must be at least 0\.0, got -1\.0"):
        Race({"model": "m", "task": "sst2"}, (Entrant("mezo", "mezo", (1e-4, -1.0)),))
    with pytest.raises(ZeroBlockError, match="mezo takes no rank"):
        Race({"model": "m", "task": "sst2"}, (Entrant("mezo", "mezo", (1e-4,), {"rank": 5}),))


@pytest.mark.parametrize(
    ("methods", "lrs", "says"),
    [
        (["mezzo"], ["1e-4"], "unknown method 'mezzo'; did you mean 'mezo'?"),
        (["mezo", "ft"], ["1e-4,1e-3", "ft=1e-5"], "the same number of learning rates: ft has 1, others have 2"),
        (["mezo"], ["lozo=1e-4"], "unknown method in --lr: 'lozo'"),
        (["mezo"], ["1e-4;1e-3"], "write numbers with commas"),
        (["mezo", "mezo"], ["1e-4"], "names an entrant twice"),
        (["mezo", "mezo auto=lozo"], ["auto"], "letters, digits, - and _ only, got 'mezo auto'"),
        (["mezo"], ["1e-4", "1e-4,3e-4"], "has a learning rate twice"),
        (["mezo"], ["mezo=1e-4", "mezo=1e-4"], "has a learning rate twice"),
        (["mezo", "ft"], ["auto", "ft=auto"], "ft needs a learning rate: give --lr ft=3e-5"),
    ],
)
def test_mistakes_are_named_before_anything_runs(methods, lrs, says):
    with pytest.raises(ZeroBlockError) as error:
        enter(methods, lrs, {})
    assert says in str(error.value)


def test_notes_name_every_heat_that_failed_once_per_reason(tmp_path):
    course = Course(
        Race({"model": "m", "task": "sst2"}, enter(["mezo", "lozo"], [], {}), seeds=1), tmp_path, "one\ntwo"
    )
    course.failed = {"a": "settled at step 7, between folds", "b": "settled at step 12, between folds", "c": "status 1"}
    course.failed["d"] = "status -9"
    found = notes(course)
    assert found[0] == "a, b failed: settled at step 7, between folds"
    assert found[1:3] == ["c failed: status 1", "d failed: status -9"]
    text = markdown(course, "")
    assert "    one\n    two\n" in text
    assert "![" not in text
