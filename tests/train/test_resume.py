"""A run that was stopped, killed or starved is resumed, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from loop_toy import Crash, Kill, kept, lines, settings, undisturbed
from typer.testing import CliRunner

import zeroblock as zb
from toy import same
from toy import snapshot as copy_of
from zeroblock.cli import app
from zeroblock.errors import ZeroBlockError
from zeroblock.journal import Journal, read
from zeroblock.method import METHODS
from zeroblock.model import load
from zeroblock.report.view import Progress, Quiet
from zeroblock.train import Config, make, resume, run
from zeroblock.train.workload import Workload


@pytest.mark.parametrize(
    ("method", "dtype"), [*zip(METHODS, itertools.cycle(["fp32", "bf16"]), strict=False), ("mezo_bcd", "bf16")]
)
def test_resumed_equals_uninterrupted(
    method: str, dtype: str, llama: Path, data: Path, tmp_path: Path, models: list[Any]
) -> None:
    config = settings(llama, data, method=method, dtype=dtype, lr_schedule="cosine", eval_limit=4)
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
    exact = config.replace(dtype="fp32")  # where it changes round-off alone
    held, plain = run(exact, tmp_path / "exact"), run(exact.replace(fold=1), tmp_path / "plain")
    assert "fold" not in read(tmp_path / "plain").header.parts
    for one, other in zip(lines(held.folder), lines(plain.folder), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-4)
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
        ({"eval_every": 3}, r"config\.toml is not the one the run began with"),
        ({"weight_decay": 0.1}, r"config\.toml is not the one the run began with"),
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
    from zeroblock.engine.engine import Engine
    from zeroblock.engine.objective import BatchObjective
    from zeroblock.run.graph import Graphs

    config = settings(llama, data, eval_start=False, eval_every=10)
    whole = undisturbed(config)
    build, losses, calls = Engine.__init__, BatchObjective.losses, []

    def building(self: Any, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **options)
        self.graphs = Graphs()

    def failing(self: BatchObjective, points: Any) -> Any:
        calls.append(points)
        if len(calls) == 7:
            assert len(read(tmp_path / "run").records) < 6
            raise torch.OutOfMemoryError("CUDA out of memory")
        return losses(self, points)

    monkeypatch.setattr(Graphs, "pays", staticmethod(lambda tokens, weights: False))
    monkeypatch.setattr(Engine, "__init__", building)
    monkeypatch.setattr(BatchObjective, "losses", failing)

    late.pace = 400.0 if broken else 1.0

    class Broken(Quiet):
        def step(self, progress: Progress) -> None:
            if broken and progress.step > 2:
                raise BrokenPipeError

    error, match = (BrokenPipeError, None) if broken else (ZeroBlockError, "the steps taken are kept")
    with pytest.raises(error, match=match):
        run(config, tmp_path / "run", Broken())
    assert len(read(tmp_path / "run").records) == (5 if broken else 6)
    monkeypatch.setattr(BatchObjective, "losses", losses)
    resume(tmp_path / "run")
    assert kept(tmp_path / "run") == whole


def test_a_replay_is_shown_and_can_be_stopped(llama: Path, data: Path, tmp_path: Path) -> None:
    config = settings(llama, data, method="mezo_bcd_adam")
    whole = undisturbed(config)
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
    assert whole == kept(tmp_path / "parts")


def test_a_run_stopped_before_its_journal_begins_again(llama: Path, data: Path, tmp_path: Path) -> None:
    config = settings(llama, data)
    whole = run(config, tmp_path / "whole")
    (tmp_path / "early").mkdir()
    shutil.copy(whole.folder / "config.toml", tmp_path / "early")
    resume(tmp_path / "early")
    assert kept(whole.folder) == kept(tmp_path / "early")
    with pytest.raises(ZeroBlockError, match="holds no run"):
        resume(tmp_path / "nowhere")


def test_records_that_ruin_the_weights_are_refused(llama: Path, data: Path, tmp_path: Path) -> None:
    run(settings(llama, data), tmp_path / "run", Kill(5))
    path = tmp_path / "run" / "journal.zbj"
    contents = read(path)
    path.unlink()
    with Journal.create(path, contents.header) as journal:
        for record in contents.records:
            journal.append(dataclasses.replace(record, coeffs=(2.0**100,), lr=2.0**100) if record.step == 2 else record)
    with pytest.raises(ZeroBlockError, match="infinite or NaN"):
        resume(tmp_path / "run")


def test_changed_data_are_refused(llama: Path, data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    config = settings(llama, tmp_path / "data")
    run(config, tmp_path / "run", Kill(3))
    file = tmp_path / "data" / "sst2" / "train.jsonl"
    before = file.read_text()
    file.write_text(before.replace('"label": 0', '"label": 1', 3))
    with pytest.raises(ZeroBlockError, match="the training data differ from those that the run"):
        resume(tmp_path / "run")
    file.write_text(before)
    other = tmp_path / "data" / "sst2" / "validation.jsonl"
    there = other.read_text()
    other.write_text(there.replace('"label": 0', '"label": 1', 3))
    with pytest.raises(ZeroBlockError, match=r"the rows that the run in .* is evaluated on differ from those"):
        resume(tmp_path / "run")
    other.write_text(there)
    assert resume(tmp_path / "run").steps == 10


def test_another_base_is_refused(llama: Path, data: Path, tmp_path: Path) -> None:
    from run_toy import save_model

    base = save_model(tmp_path / "model")
    run(settings(base, data), tmp_path / "run", Kill(3))
    save_model(base, seed=1)
    with pytest.raises(ZeroBlockError, match="other base weights"):
        resume(tmp_path / "run")


def test_memory_that_runs_out(llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(llama, data)
    whole = undisturbed(config)
    closures, calls = Workload.objectives, []

    def greedy(self: Workload, batch: Any, share: Any) -> list[Any]:
        calls.append(batch)
        found = closures(self, batch, share)
        return found if len(calls) < 5 else [lambda: torch.empty(1 << 55).sum()]  # refused by the allocator

    monkeypatch.setattr(Workload, "objectives", greedy)
    with pytest.raises(ZeroBlockError, match=r"out of memory: lower --max-tokens .* zeroblock resume .*run"):
        run(config, tmp_path / "run")
    monkeypatch.undo()
    resume(tmp_path / "run")
    assert whole == kept(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "room", "message"),
    [
        ({"snapshot_every": 4}, 2000, "the snapshot of step 4 could not be written"),
        ({"eval_every": 1}, 2000, r"cannot write to .* zeroblock resume"),
        ({}, 10_000, r"cannot write to .* zeroblock resume"),
    ],
    ids=["snapshot", "evaluations", "figures"],
)
def test_a_full_disk(
    changes: dict[str, int],
    room: int,
    message: str,
    llama: Path,
    data: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """No file may grow beyond a limit: the journal fits, something else does not."""
    if not changes:
        request.getfixturevalue("figures")
    config = settings(llama, data, **changes)
    whole = undisturbed(config)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(ZeroBlockError, match=message):
            run(config, tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    resume(tmp_path / "run")
    assert whole == kept(tmp_path / "run")
    assert (tmp_path / "run" / "summary.md").exists()


@pytest.mark.parametrize("cut", [1, 2, 40], ids=["its end", "its last brace", "half of it"])
def test_an_evaluation_whose_line_is_torn_is_made_again(cut: int, llama: Path, data: Path, tmp_path: Path) -> None:
    """Its step lies behind the journal's end: the replay stops there."""
    config = settings(llama, data, eval_every=2, snapshot_every=5)
    whole = undisturbed(config)
    run(config, tmp_path / "run", Kill(6))
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-cut])
    resume(tmp_path / "run")
    assert whole == kept(tmp_path / "run")


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
    whole = undisturbed(settings(llama, data))
    result = run(settings(llama, data, max_minutes=1e-9), tmp_path / "run")
    sittings = 1
    while result.summary is None:
        result = resume(tmp_path / "run")
        sittings += 1
        assert sittings < 40
    assert sittings > 10
    assert whole == kept(tmp_path / "run")


def test_the_time_allowed_to_what_cannot_be_resumed(llama: Path, data: Path, tmp_path: Path) -> None:
    """Fine-tuning ends with its results, not with nothing."""
    config = settings(llama, data, method="ft", steps=1_000_000, eval_every=1_000_000, max_minutes=0.02)
    result = run(config, tmp_path / "run")
    assert result.summary is not None
    assert result.summary["selected_step"] == result.steps > 0
    assert (tmp_path / "run" / "summary.md").exists()


def test_a_second_interrupt_quits_at_once(
    llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two in one forward pass: the first is noted, the second leaves the pass; nothing of the step is kept."""
    config = settings(llama, data)
    whole = undisturbed(config)
    closures, calls = Workload.objectives, []

    def impatient(self: Workload, batch: Any, share: Any) -> list[Any]:
        calls.append(batch)
        (found,) = closures(self, batch, share)

        def closure() -> Any:
            value = found()
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
            return value

        return [found] if len(calls) < 4 else [closure]

    monkeypatch.setattr(Workload, "objectives", impatient)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run")
    assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.undo()
    assert len(read(tmp_path / "run").records) == 3
    resume(tmp_path / "run")
    assert whole == kept(tmp_path / "run")
