"""The loop: every method runs, leaves a whole folder, and resumes bit for bit."""

from __future__ import annotations

import csv
import json
import os
import re
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from typer.testing import CliRunner

import zeroblock as zb
from toy import same
from toy import snapshot as copy_of
from zeroblock.cli import app
from zeroblock.errors import ZeroBlockError, ZeroBlockWarning
from zeroblock.journal import read
from zeroblock.method import METHODS
from zeroblock.model import load
from zeroblock.train import Config, Result, loop, make, measure, resume, run, shelf
from zeroblock.train.evaluate import Evaluation
from zeroblock.train.setting import Setting
from zeroblock.train.summary import select
from zeroblock.train.view import Progress, Quiet

OPTIONS: dict[str, dict[str, Any]] = {
    "mezo_bcd_adam": {"interval": 3},
    "mezo_bcd_adaptive": {"probes": 2},
    "lozo": {"interval": 4},  # held for four steps, and for two at the end
    "lozo_m": {"interval": 6},
    "zo_momentum": {"partition": "layers", "order": "flip-flop"},
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
    prepare = loop.prepare

    def spy(*arguments: Any, **options: Any) -> Setting:
        setting = prepare(*arguments, **options)
        seen.append(setting.model)
        return setting

    monkeypatch.setattr(loop, "prepare", spy)
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


@pytest.mark.parametrize("method", ["mezo_bcd", "mezo", "ft"])
def test_what_is_frozen_stays(method: str, llama: Path, data: Path, tmp_path: Path, models: list[Any]) -> None:
    pattern = "*embed*, *.layers.0.*"
    base = copy_of(load(str(llama), "fp32", "cpu"))
    with shelf.keeping():  # the second run gets the same model, whole again
        run(settings(llama, data, method=method, freeze=pattern, dtype="fp32"), tmp_path / "frozen")
        moved = {name for name, weight in copy_of(models[-1]).items() if not torch.equal(weight, base[name])}
        run(settings(llama, data, method=method, dtype="fp32", steps=20), tmp_path / "free")
    frozen = {name for name in base if "embed" in name or ".layers.0." in name}
    assert frozen
    assert moved == set(base) - frozen
    assert {name for name, weight in copy_of(models[-1]).items() if not torch.equal(weight, base[name])} == set(base)
    if method == "ft":
        return
    assert set(read(tmp_path / "frozen").header.frozen) == frozen
    config = settings(llama, data, method=method, freeze=pattern, dtype="fp32")
    run(config, tmp_path / "parts", Kill(5))
    resume(tmp_path / "parts")
    assert kept(tmp_path / "parts") == kept(tmp_path / "frozen")


def test_what_a_model_freezes_itself_stays_frozen(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded, taken from the shelf after a run that froze more, or with a pattern: its own flags hold."""

    def loaded(*arguments: Any, **options: Any) -> Any:
        module = load(*arguments, **options)
        module.model.norm.weight.requires_grad_(False)
        return module

    monkeypatch.setattr(shelf.models, "load", loaded)
    plain = Config.of({"model": str(llama), "task": "sst2", "lr": 1e-3, "device": "cpu"})
    with shelf.keeping():
        for config, frozen in ((plain, 1), (plain.replace(freeze="*embed*"), 2), (plain, 1)):
            flags = [param.requires_grad for param in shelf.model(config).parameters()]
            assert flags.count(False) == frozen


def test_a_pattern_that_freezes_nothing_or_all_is_refused(llama: Path, data: Path, tmp_path: Path) -> None:
    for pattern, message in (("*embd*", r"no parameter is called '\*embd\*'"), ("*", "leaves nothing to train")):
        with pytest.raises(ZeroBlockError, match=message):
            run(settings(llama, data, freeze=pattern), tmp_path / "run")
    with pytest.raises(ZeroBlockError, match="nothing to freeze"):
        settings(llama, data, method="zero-shot", lr=None, freeze="*")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("method", METHODS)
def test_resumed_equals_uninterrupted(
    method: str, dtype: str, llama: Path, data: Path, tmp_path: Path, models: list[Any]
) -> None:
    config = settings(llama, data, method=method, dtype=dtype, schedule="cosine")
    whole = run(config, tmp_path / "whole")
    assert (whole.steps, whole.reason) == (10, "")
    stopped = run(config, tmp_path / "parts", Kill(5))
    assert (stopped.steps, stopped.summary, stopped.reason, stopped.code) == (5, None, "terminated", 143)
    with pytest.raises(RuntimeError, match="a crash"):
        resume(tmp_path / "parts", Crash(7))
    assert len(read(tmp_path / "parts").records) == 7
    finished = resume(tmp_path / "parts")
    assert same(copy_of(models[0]), copy_of(models[-1]))
    assert not same(copy_of(models[0]), copy_of(load(config.model, dtype, "cpu")))
    assert kept(tmp_path / "whole") == kept(tmp_path / "parts")
    assert finished.summary is not None
    assert [p.name for p in (tmp_path / "parts").glob("*.part")] == []


@pytest.mark.parametrize("method", ["mezo_bcd_adam", "lozo"])
def test_a_snapshot_shortens_the_replay(
    method: str, llama: Path, data: Path, tmp_path: Path, models: list[Any]
) -> None:
    config = settings(llama, data, method=method, snapshot_every=3)
    whole = run(config, tmp_path / "whole")
    told: list[str] = []

    class Told(Quiet):
        def note(self, text: str) -> None:
            told.append(text)

    run(config, tmp_path / "parts", Kill(8))
    resume(tmp_path / "parts", Told())
    assert "replaying 2 of 8 steps" in told
    assert same(copy_of(models[0]), copy_of(models[-1]))
    assert kept(whole.folder) == kept(tmp_path / "parts")
    # a snapshot beyond what the journal knows of is no use
    run(config, tmp_path / "torn", Kill(8))
    journal = tmp_path / "torn" / "journal.zbj"
    size = (journal.stat().st_size - len(read(journal).header.encode()) - 20) // 8
    os.truncate(journal, journal.stat().st_size - 5 * size - 3)
    told.clear()
    resume(tmp_path / "torn", Told())
    assert "replaying 2 of 2 steps" in told
    assert any("cut" in text for text in told)
    assert kept(whole.folder) == kept(tmp_path / "torn")


def test_low_rank_steps_are_held_from_one_evaluation_to_the_next(
    llama: Path, data: Path, tmp_path: Path, models: list[Any]
) -> None:
    """And the last evaluation is one of the weights that the journal gives."""
    config = settings(llama, data, method="lozo", dtype="bf16", lr=1e-2)
    result = run(config, tmp_path / "held")
    assert Config.load(tmp_path / "held" / "config.toml").fold is None
    assert read(tmp_path / "held").header.parts["fold"] == "4"
    model = load(config.model, "bf16", "cpu")
    zb.load(model, tmp_path / "held")
    assert same(copy_of(model), copy_of(models[0]))
    plain = run(config.replace(fold=1), tmp_path / "plain")
    assert "fold" not in read(tmp_path / "plain").header.parts
    for one, other in zip(lines(result.folder), lines(plain.folder), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=0.05)
    assert lines(result.folder)[-1] != lines(result.folder)[0]
    # what a run of another time held is in its journal
    run(config.replace(fold=2), tmp_path / "two", Kill(5))
    toml = tmp_path / "two" / "config.toml"
    toml.write_text(toml.read_text().replace("fold = 2\n", ""))
    make(config, tmp_path / "two")
    assert read(tmp_path / "two").header.parts["fold"] == "2"
    assert kept(run(config.replace(fold=2), tmp_path / "again").folder) == kept(tmp_path / "two")


def test_weights_between_two_folds_can_be_had(llama: Path, data: Path, tmp_path: Path) -> None:
    config = settings(llama, data, method="lozo", dtype="bf16", lr=1e-2)
    folder = run(config, tmp_path / "run").folder
    contents = read(folder)
    model = load(config.model, "bf16", "cpu")
    optimizer = contents.header.rebuild(model)
    zb.replay(optimizer, contents.records[:7])
    behind = copy_of(model)
    optimizer.settle()
    assert not same(copy_of(model), behind)
    out = tmp_path / "seventh"
    assert CliRunner().invoke(app, ["replay", str(folder), "--step", "7", "--out", str(out)]).exit_code == 0
    assert same(copy_of(load(str(out), "bf16", "cpu")), copy_of(model))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fold": 2}, "written with fold 4, this optimizer has 2"),
        ({"eval_every": 3}, r"config\.toml is not what the run began with"),
        ({"weight_decay": 0.1}, r"config\.toml is not what the run began with"),
    ],
    ids=str,
)
def test_another_fold_is_another_run(
    change: dict[str, Any], message: str, llama: Path, data: Path, tmp_path: Path
) -> None:
    run(settings(llama, data, method="lozo"), tmp_path / "run", Kill(5))
    toml = tmp_path / "run" / "config.toml"
    toml.write_text(Config.load(toml).replace(**change).dump())
    with pytest.raises(ZeroBlockError, match=message):
        resume(tmp_path / "run")


@pytest.mark.parametrize("broken", [False, True])
def test_steps_under_way_when_a_run_fails_are_kept(
    broken: bool, llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: type
) -> None:
    """As on a GPU that runs out of memory: the journal hears of what was taken, and the run goes on from there."""
    from zeroblock.engine import engine as engines
    from zeroblock.engine import graph

    config = settings(llama, data, eval_start=False, eval_every=10)
    whole = run(config, tmp_path / "whole")
    build, launch = engines.Engine.__init__, engines.launch

    def building(self: Any, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **options)
        self.graphs = graph.Graphs()

    def failing(optimizer: Any, objective: Any) -> Any:
        if optimizer.steps == 6:
            assert len(read(tmp_path / "run").records) < 6
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(optimizer, objective)

    monkeypatch.setattr(graph.Graphs, "pays", staticmethod(lambda tokens, weights: False))
    monkeypatch.setattr(engines.Engine, "__init__", building)
    monkeypatch.setattr(engines, "launch", failing)

    late.pace = 400.0 if broken else 1.0

    class Broken(Quiet):
        def step(self, progress: Progress) -> None:
            if broken and progress.step > 2:
                raise BrokenPipeError

    error, match = (BrokenPipeError, None) if broken else (ZeroBlockError, "the steps taken are kept")
    with pytest.raises(error, match=match):
        run(config, tmp_path / "run", Broken())
    assert len(read(tmp_path / "run").records) == (5 if broken else 6)
    monkeypatch.setattr(engines, "launch", launch)
    resume(tmp_path / "run")
    assert kept(tmp_path / "run") == kept(whole.folder)


@pytest.mark.parametrize("how", ["empty", "cut", "flipped", "another run's", "half removed"])
def test_a_snapshot_that_is_no_use_is_left_alone(how: str, llama: Path, data: Path, tmp_path: Path) -> None:
    config = settings(llama, data, method="mezo_bcd_adam", snapshot_every=3)
    whole = run(config.replace(snapshot_every=0), tmp_path / "whole")
    run(config, tmp_path / "parts", Kill(8))
    place, told = tmp_path / "parts" / "snapshot", []
    weights = place / "weights.safetensors"
    match how:
        case "empty":
            (place / "state.pt").write_bytes(b"")
        case "cut":
            os.truncate(weights, weights.stat().st_size // 2)
        case "flipped":
            data_there = bytearray(weights.read_bytes())
            data_there[-5] ^= 1
            weights.write_bytes(data_there)
        case "another run's":
            run(config.replace(lr=2e-3), tmp_path / "other", Kill(8))
            shutil.rmtree(place)
            shutil.copytree(tmp_path / "other" / "snapshot", place)
        case _:  # killed while the one before was being removed
            (tmp_path / "parts" / "snapshot.old").mkdir()
            (tmp_path / "parts" / "snapshot.old" / "state.pt").write_bytes(b"")

    class Told(Quiet):
        def note(self, text: str) -> None:
            told.append(text)

    resume(tmp_path / "parts", Told())
    assert ("replaying 8 of 8 steps" in told) == (how != "half removed")
    assert any("snapshot is" in text for text in told) == (how != "half removed")
    assert kept(whole.folder) == kept(tmp_path / "parts")


def test_a_folder_that_is_called_snapshot_is_let_be(llama: Path, data: Path, tmp_path: Path) -> None:
    """``--out`` may be a folder that holds other things."""
    mine = tmp_path / "run" / "snapshot" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("dear")
    config = settings(llama, data)
    with pytest.raises(ZeroBlockError, match="snapshot is there already, and not this run's: give another --out"):
        run(config.replace(snapshot_every=2), tmp_path / "run")
    run(config, tmp_path / "run", Kill(3))
    assert resume(tmp_path / "run").steps == 10
    assert mine.read_text() == "dear"


def test_a_replay_is_shown_and_can_be_stopped(llama: Path, data: Path, tmp_path: Path) -> None:
    config = settings(llama, data, method="mezo_bcd_adam")
    whole = run(config, tmp_path / "whole")
    run(config, tmp_path / "parts", Kill(7))

    class Impatient(Quiet):
        seen: ClassVar[list[tuple[int, int]]] = []

        def replaying(self, step: int, steps: int) -> None:
            self.seen.append((step, steps))
            if step == 2:
                os.kill(os.getpid(), signal.SIGINT)

    stopped = resume(tmp_path / "parts", Impatient())
    assert Impatient.seen == [(1, 7), (2, 7)]
    assert (stopped.steps, stopped.reason, stopped.code) == (7, "interrupted", 130)
    assert len(read(tmp_path / "parts").records) == 7
    resume(tmp_path / "parts")
    assert kept(whole.folder) == kept(tmp_path / "parts")


def test_a_run_leaves_a_whole_folder(opt: Path, data: Path, tmp_path: Path) -> None:
    result = run(settings(opt, data, warmup=4), tmp_path / "run")
    folder = result.folder
    config = Config.load(folder / "config.toml")
    assert (folder / "config.toml").read_text().startswith("# zeroblock train --config")
    assert (config.dtype, config.eval_every, config.steps) == ("fp32", 4, 10)
    points = lines(folder)
    assert [(p["step"], p["split"]) for p in points] == [(s, x) for s in (0, 4, 8, 10) for x in ("dev", "test")]
    assert set(points[0]) == {"kind", "step", "split", "metric", "value", "loss", "n"}
    with (folder / "steps.csv").open() as file:
        steps = list(csv.DictReader(file))
    records = read(folder).records
    assert [int(row["step"]) for row in steps] == list(range(10))
    assert [float(row["loss"]) for row in steps] == pytest.approx([r.loss for r in records], rel=1e-6)
    assert [float(row["coeff"]) for row in steps] == pytest.approx([r.coeffs[0] for r in records], rel=1e-6)
    assert [float(row["lr"]) for row in steps][:5] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])
    assert [int(row["block"]) for row in steps] == [r.block for r in records]
    summary = json.loads((folder / "summary.json").read_text())
    dev = {p["step"]: p for p in points if p["split"] == "dev" and p["step"]}
    test = {p["step"]: p for p in points if p["split"] == "test" and p["step"]}
    chosen = min(dev, key=lambda step: dev[step]["loss"])
    assert (summary["selected_step"], summary["selected_by"]) == (chosen, "dev loss")
    assert summary["dev"]["value"] == dev[chosen]["value"]
    assert summary["test"]["selected"] == test[chosen]["value"]
    assert summary["test"]["best"] == max(p["value"] for p in test.values())
    assert summary["zero_shot"] == {"dev": points[0]["value"], "test": points[1]["value"]}
    assert (folder / "summary.md").exists()
    with pytest.raises(ZeroBlockError, match=r"holds a run already: zeroblock resume .*run, or give another --out"):
        run(config, folder)
    with pytest.raises(ZeroBlockError, match="has finished"):
        resume(folder)
    assert make(config, folder).summary == summary
    with pytest.raises(ZeroBlockError, match=r"holds a run with lr 0\.001, not 0\.1"):
        make(config.replace(lr=0.1), folder)


def test_make_finishes_what_there_is(llama: Path, data: Path, tmp_path: Path) -> None:
    config = settings(llama, data)
    whole = make(config, tmp_path / "whole")
    run(config, tmp_path / "parts", Kill(3, signal.SIGINT))
    assert make(config.replace(max_tokens=64), tmp_path / "parts").steps == 10
    assert read(whole.folder).records[:3] == read(tmp_path / "parts").records[:3]
    fine = settings(llama, data, method="ft")
    stopped = run(fine, tmp_path / "ft", Kill(3, signal.SIGINT))
    assert (stopped.reason, stopped.code) == ("interrupted", 130)
    with pytest.raises(ZeroBlockError, match="ft keeps no journal"):
        resume(tmp_path / "ft")
    assert make(fine, tmp_path / "ft").steps == 10
    assert len(lines(tmp_path / "ft")) == 8


def test_a_run_stopped_before_its_journal_begins_again(llama: Path, data: Path, tmp_path: Path) -> None:
    config = settings(llama, data)
    whole = run(config, tmp_path / "whole")
    (tmp_path / "early").mkdir()
    shutil.copy(whole.folder / "config.toml", tmp_path / "early")
    resume(tmp_path / "early")
    assert kept(whole.folder) == kept(tmp_path / "early")
    with pytest.raises(ZeroBlockError, match="holds no run"):
        resume(tmp_path / "nowhere")


def test_fine_tuning_is_adam(llama: Path, data: Path, tmp_path: Path, models: list[Any]) -> None:
    """Against torch by hand, on the same batches."""
    config = settings(llama, data, method="ft", steps=3, accumulate=2, batch_size=2)
    result = run(config, tmp_path / "ft")
    assert not (result.folder / "journal.zbj").exists()
    setting = loop.prepare(config)
    optimizer = torch.optim.Adam(setting.model.parameters(), lr=config.lr)
    order = loop.Order(len(setting.train), 4, 0)
    for step in range(3):
        encoded, labels = zip(*(setting.train[i] for i in order.batch(step)), strict=True)
        optimizer.zero_grad()
        setting.engine.objective(encoded, labels).__call__().backward()
        optimizer.step()
    for a, b in zip(models[0].parameters(), setting.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_fine_tuning_learns(llama: Path, data: Path, tmp_path: Path) -> None:
    result = run(settings(llama, data, method="ft", steps=60, batch_size=16, lr=3e-3, eval_every=60), tmp_path / "ft")
    assert result.summary is not None
    assert result.summary["test"]["selected"] > 0.9 > result.summary["zero_shot"]["test"]


def test_a_zeroth_order_method_learns(llama: Path, data: Path, tmp_path: Path) -> None:
    result = run(settings(llama, data, steps=200, batch_size=16, lr=3e-3, eval_every=200), tmp_path / "run")
    before, after = (point["loss"] for point in lines(result.folder) if point["split"] == "dev")
    assert after < before - 0.01


@pytest.mark.parametrize("engine", ["forked", "sequential"])
def test_accumulation_is_a_larger_batch(engine: str, llama: Path, data: Path, tmp_path: Path) -> None:
    config = settings(llama, data, engine=engine, steps=4, eval_start=False, eval_every=4)
    one = run(config.replace(batch_size=8), tmp_path / "one")
    two = run(config.replace(batch_size=4, accumulate=2), tmp_path / "two")
    losses = [[record.loss for record in read(result.folder).records] for result in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_forked_is_sequential(llama: Path, data: Path, tmp_path: Path) -> None:
    results = [run(settings(llama, data, engine=e), tmp_path / e) for e in ("forked", "sequential")]
    a, b = ([record.losses for record in read(result.folder).records] for result in results)
    for x, y in zip(a, b, strict=True):
        assert x == pytest.approx(y, abs=1e-5)


@pytest.mark.parametrize("method", ["zero-shot", "icl"])
def test_methods_without_training(method: str, llama: Path, data: Path, tmp_path: Path) -> None:
    config = settings(llama, data, method=method, shots=3 if method == "icl" else 0, lr=None)
    result = run(config, tmp_path / "run")
    assert result.summary is not None
    assert (result.steps, result.summary["selected_step"]) == (0, 0)
    assert result.summary["test"]["selected"] == result.summary["test"]["best"]
    assert measure(config, "test").value == result.summary["test"]["selected"]
    assert measure(config, "dev").loss == pytest.approx(result.summary["dev"]["loss"])
    assert not (result.folder / "journal.zbj").exists()
    assert (result.folder / "summary.md").exists()


def test_a_metric_is_an_objective(llama: Path, data: Path, tmp_path: Path) -> None:
    """The losses of a step are one minus the accuracy at the two points."""
    config = settings(llama, data, objective="accuracy", eps=0.1, batch_size=8)
    result = run(config, tmp_path / "accuracy")
    losses = [loss for record in read(result.folder).records for loss in record.losses]
    assert all(8 * loss == pytest.approx(round(8 * loss), abs=1e-4) for loss in losses)
    assert len(set(losses)) > 1
    assert result.summary is not None
    assert result.summary["selected_by"] == "dev accuracy"
    with pytest.raises(ZeroBlockError, match="sst2 is measured by accuracy: use objective accuracy"):
        run(settings(llama, data, objective="f1"), tmp_path / "no")
    for other in ("accuracy", "exact_match"):
        with pytest.raises(ZeroBlockError, match="squad is measured by f1: use objective f1"):
            run(settings(llama, data, task="squad", objective=other), tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("objective", ["loss", "f1"])
def test_a_task_that_generates(objective: str, llama: Path, data: Path, tmp_path: Path) -> None:
    config = settings(llama, data, task="squad", objective=objective, steps=2, eval_every=2, eval_limit=5, batch_size=2)
    result = run(config, tmp_path / "run")
    assert result.summary is not None
    assert result.summary["metric"] == "f1"
    assert result.summary["dev"]["n"] == result.summary["test"]["n"] == 5
    assert "exact_match" in lines(result.folder)[0]
    stopped = run(config, tmp_path / "parts", Kill(1))
    assert stopped.steps == 1
    resume(tmp_path / "parts")
    assert kept(result.folder) == kept(tmp_path / "parts")


def test_changed_data_are_refused(llama: Path, data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    config = settings(llama, tmp_path / "data")
    run(config, tmp_path / "run", Kill(3))
    file = tmp_path / "data" / "sst2" / "train.jsonl"
    before = file.read_text()
    file.write_text(before.replace('"label": 0', '"label": 1', 3))
    with pytest.raises(ZeroBlockError, match="the training data are not those that the run"):
        resume(tmp_path / "run")
    file.write_text(before)
    other = tmp_path / "data" / "sst2" / "validation.jsonl"
    there = other.read_text()
    other.write_text(there.replace('"label": 0', '"label": 1', 3))
    with pytest.raises(ZeroBlockError, match=r"the rows that the run in .* is evaluated on are not those"):
        resume(tmp_path / "run")
    other.write_text(there)
    assert resume(tmp_path / "run").steps == 10


def test_a_model_that_broke_knows_nothing(opt: Path, data: Path, tmp_path: Path) -> None:
    """Where all scores are not numbers the first option would be chosen, which is right half of the time."""
    broken = settings(opt, data, lr=1e30, eval_start=False)
    with pytest.warns(ZeroBlockWarning, match="not finite"):
        result = run(broken, tmp_path / "run")
    found = lines(result.folder)
    assert [(line["value"], line["loss"]) for line in found] == [(0.0, None)] * len(found)
    with pytest.warns(ZeroBlockWarning, match="not finite"), pytest.raises(ZeroBlockError, match="20 steps in a row"):
        run(broken.replace(steps=30, eval_every=30, objective="accuracy", eps=0.1), tmp_path / "no")


def test_another_base_is_refused(llama: Path, data: Path, tmp_path: Path) -> None:
    from train_toy import save_model

    base = save_model(tmp_path / "model")
    run(settings(base, data), tmp_path / "run", Kill(3))
    save_model(base, seed=1)
    with pytest.raises(ZeroBlockError, match="other base weights"):
        resume(tmp_path / "run")


def test_memory_that_runs_out(llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(llama, data)
    whole = run(config, tmp_path / "whole")
    closures, calls = Setting.closures, []

    def greedy(self: Setting, batch: Any) -> list[Any]:
        calls.append(batch)
        found = closures(self, batch)
        return found if len(calls) < 5 else [lambda: torch.empty(1 << 55).sum()]  # refused by the allocator

    monkeypatch.setattr(Setting, "closures", greedy)
    with pytest.raises(ZeroBlockError, match=r"out of memory: lower --max-tokens .* zeroblock resume .*run"):
        run(config, tmp_path / "run")
    monkeypatch.undo()
    resume(tmp_path / "run")
    assert kept(whole.folder) == kept(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "room", "message"),
    [
        ({"snapshot_every": 4}, 2000, "the snapshot of step 4 could not be written"),
        ({"eval_every": 1}, 2000, r"cannot write to .* zeroblock resume"),
        ({}, 10_000, r"cannot write to .* zeroblock resume"),
    ],
    ids=["snapshot", "evaluations", "figures"],
)
def test_a_full_disk(changes: dict[str, int], room: int, message: str, llama: Path, data: Path, tmp_path: Path) -> None:
    """No file may grow beyond a limit: the journal fits, something else does not."""
    config = settings(llama, data, **changes)
    whole = run(config, tmp_path / "whole")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(ZeroBlockError, match=message):
            run(config, tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    resume(tmp_path / "run")
    assert kept(whole.folder) == kept(tmp_path / "run")
    assert (tmp_path / "run" / "summary.md").exists()


@pytest.mark.parametrize("cut", [1, 2, 40], ids=["its end", "its last brace", "half of it"])
def test_an_evaluation_whose_line_is_torn_is_made_again(cut: int, llama: Path, data: Path, tmp_path: Path) -> None:
    """Its step lies behind the journal's end: the replay stops there."""
    config = settings(llama, data, eval_every=2, snapshot_every=5)
    whole = run(config, tmp_path / "whole")
    run(config, tmp_path / "run", Kill(6))
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-cut])
    resume(tmp_path / "run")
    assert kept(whole.folder) == kept(tmp_path / "run")


def test_a_folder_that_cannot_be_written(llama: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ZeroBlockError, match=r"cannot write to .* or give another --out"):
        run(settings(llama, data), tmp_path / "file" / "run")


def test_the_time_allowed(llama: Path, data: Path, tmp_path: Path) -> None:
    config = settings(llama, data, steps=1_000_000, eval_every=1_000_000, max_minutes=0.02)
    result = run(config, tmp_path / "run")
    assert (result.summary, result.reason, result.code) == (None, "the time is up", 0)
    assert 0 < result.steps == len(read(tmp_path / "run").records)
    assert (tmp_path / "run" / "steps.csv").exists()
    further = resume(tmp_path / "run", max_minutes=0.03)
    assert further.steps > result.steps


def test_a_sitting_gets_somewhere_whatever_the_time_allowed(
    llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation, or a replay and a step, that takes longer than allowed is not begun anew for ever."""
    whole = run(settings(llama, data), tmp_path / "whole")
    result = run(settings(llama, data, max_minutes=1e-9), tmp_path / "run")
    sittings = 1
    while result.summary is None:
        result = resume(tmp_path / "run")
        sittings += 1
        assert sittings < 40
    assert sittings > 10
    assert kept(whole.folder) == kept(tmp_path / "run")


def test_the_time_allowed_to_what_cannot_be_resumed(llama: Path, data: Path, tmp_path: Path) -> None:
    """Fine-tuning ends with its results, not with nothing."""
    config = settings(llama, data, method="ft", steps=1_000_000, eval_every=1_000_000, max_minutes=0.02)
    result = run(config, tmp_path / "run")
    assert result.summary is not None
    assert result.summary["selected_step"] == result.steps > 0
    assert (tmp_path / "run" / "summary.md").exists()


def test_rows_that_do_not_fit_are_named(llama: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "short:", "completion": " a"} for _ in range(40)]
    rows[19] = {"prompt": "x" * 230 + ":", "completion": " a"}  # fits with its answer, not with what may be generated
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = settings(llama, tmp_path).replace(task=str(file), data=None, dev=None, test=None, train=None)
    notes = [note for seed in range(6) for note in loop.prepare(config.replace(data_seed=seed)).notes]
    assert any(
        re.search(r"contexts cut on the left .*: 1 (dev|test), the first being .*own\.jsonl:20$", n) for n in notes
    )
    rows[19] = {"prompt": "x:", "completion": " " + "y" * 60}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes = [note for seed in range(6) for note in loop.prepare(config.replace(data_seed=seed)).notes]
    assert any("answers longer than the 50 tokens that are generated: 1 of dev and test" in note for note in notes)
    rows[19] = {"prompt": "x:", "completion": " " + "y" * 300}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ZeroBlockError, match=r"own\.jsonl:20: an option of \d+ tokens in a maximum length"):
        loop.prepare(config)


def test_a_tracker_that_is_not_there_leaves_the_folder_alone(
    llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ZeroBlockError, match="pip install wandb"):
        run(settings(llama, data, track="wandb"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_second_interrupt_quits_at_once(
    llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two in one forward pass: the first is noted, the second leaves the pass; nothing of the step is kept."""
    config = settings(llama, data)
    whole = run(config, tmp_path / "whole")
    closures, calls = Setting.closures, []

    def impatient(self: Setting, batch: Any) -> list[Any]:
        calls.append(batch)
        (found,) = closures(self, batch)

        def closure() -> Any:
            value = found()
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
            return value

        return [found] if len(calls) < 4 else [closure]

    monkeypatch.setattr(Setting, "closures", impatient)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run")
    assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.undo()
    assert len(read(tmp_path / "run").records) == 3
    resume(tmp_path / "run")
    assert kept(whole.folder) == kept(tmp_path / "run")


def test_only_short_examples_are_trained_on(llama: Path, data: Path, tmp_path: Path) -> None:
    setting = loop.prepare(settings(llama, data, train_tokens=22))
    everything = loop.prepare(settings(llama, data))
    lengths = [max(len(ids) for ids, _ in one.rows) for one, _ in everything.train]
    assert len(setting.train) == sum(length <= 22 for length in lengths) < len(lengths)
    assert setting.fingerprint != everything.fingerprint
    with pytest.raises(ZeroBlockError, match="leaves no training example"):
        loop.prepare(settings(llama, data, train_tokens=2))


def test_selection() -> None:
    def found(value: float, loss: float) -> Evaluation:
        return Evaluation("accuracy", value, loss, 1, 0.0)

    nan = float("nan")
    points = {8: found(0.9, 0.7), 4: found(0.7, 0.5), 12: found(0.9, nan), 16: found(0.8, 0.5)}
    assert select(points, by_loss=True) == 4
    assert select(points, by_loss=False) == 8
    assert select({2: found(0.5, nan), 3: found(0.5, 9.0)}, by_loss=True) == 3


def test_a_user_sees_where_the_numbers_are(llama: Path, data: Path, tmp_path: Path) -> None:
    result: Result = run(settings(llama, data, steps=2), tmp_path / "run")
    text = (result.folder / "summary.md").read_text()
    assert "metrics.jsonl" in text


def test_a_kept_model_starts_from_its_own_weights(llama: Path, opt: Path, data: Path, tmp_path: Path) -> None:
    """Runs one after another on one loaded model are the runs of fresh ones."""
    configs = [
        settings(llama, data, steps=4),
        settings(llama, data, steps=4, method="ft"),
        settings(llama, data, steps=4, seed=1),
        settings(opt, data, steps=4),
        settings(llama, data, steps=4),
    ]
    fresh = [run(config, tmp_path / f"fresh{i}") for i, config in enumerate(configs)]
    with shelf.keeping():
        kept_ones = [run(config, tmp_path / f"kept{i}") for i, config in enumerate(configs)]
        first, second = (loop.prepare(config).model for config in (configs[0], configs[2]))
        assert first is second
    for a, b in zip(fresh, kept_ones, strict=True):
        assert lines(a.folder) == lines(b.folder)
        assert (a.folder / "steps.csv").read_text() == (b.folder / "steps.csv").read_text()
    assert loop.prepare(configs[0]).model is not loop.prepare(configs[0]).model
