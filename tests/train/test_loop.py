"""The loop: every method runs, and leaves a whole folder."""

from __future__ import annotations

import csv
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_toy import Kill, kept, lines, settings

from zeroblock.errors import ZeroBlockError, ZeroBlockWarning
from zeroblock.journal import read
from zeroblock.train import Config, Result, loop, make, measure, resume, run
from zeroblock.train.batch import Batches


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


def test_fine_tuning_is_adam(llama: Path, data: Path, tmp_path: Path, models: list[Any]) -> None:
    """Against torch by hand, on the same batches."""
    config = settings(llama, data, method="ft", steps=3, accumulate=2, batch_size=2)
    result = run(config, tmp_path / "ft")
    assert not (result.folder / "journal.zbj").exists()
    setting = loop.prepare(config)
    optimizer = torch.optim.Adam(setting.model.parameters(), lr=config.lr)
    batches = Batches(len(setting.train), 4, 0)
    for step in range(3):
        encoded, labels = zip(*(setting.train[i] for i in batches.at(step)), strict=True)
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


def test_a_model_that_broke_knows_nothing(opt: Path, data: Path, tmp_path: Path) -> None:
    """Where all scores are not numbers the first option would be chosen, which is right half of the time."""
    broken = settings(opt, data, lr=1e30, eval_start=False)
    with pytest.warns(ZeroBlockWarning, match="not finite"):
        result = run(broken, tmp_path / "run")
    found = lines(result.folder)
    assert [(line["value"], line["loss"]) for line in found] == [(0.0, None)] * len(found)
    with pytest.warns(ZeroBlockWarning, match="not finite"), pytest.raises(ZeroBlockError, match="20 steps in a row"):
        run(broken.replace(steps=30, eval_every=30, objective="accuracy", eps=0.1), tmp_path / "no")


def test_a_tracker_that_is_not_there_leaves_the_folder_alone(
    llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ZeroBlockError, match="pip install wandb"):
        run(settings(llama, data, track="wandb"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_user_sees_where_the_numbers_are(llama: Path, data: Path, tmp_path: Path) -> None:
    result: Result = run(settings(llama, data, steps=2), tmp_path / "run")
    text = (result.folder / "summary.md").read_text()
    assert "metrics.jsonl" in text
