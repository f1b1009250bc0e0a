"""Runs without a learning rate."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
from loop_toy import Kill, kept, settings
from typer.testing import CliRunner

import zeroblock as zb
from toy import Tiny, next_token, same
from toy import snapshot as copy_of
from zeroblock import budget
from zeroblock.budget import DISPLACEMENT, Budget
from zeroblock.cli import app
from zeroblock.errors import ZeroBlockError
from zeroblock.journal import read
from zeroblock.report.view import Progress, Quiet, step_line
from zeroblock.schedule import SCHEDULES, Economical, Weighing
from zeroblock.schedule.base import Blind
from zeroblock.size import root_mean_square
from zeroblock.train import Config, resume, run
from zeroblock.train.lr import Rates, unweighted


class Sizes(Quiet):
    """Keeps what the live view is shown."""

    def __init__(self) -> None:
        self.seen: list[Progress] = []

    def step(self, progress: Progress) -> None:
        self.seen.append(progress)


def test_a_run_without_lr_is_resumed_bit_for_bit_and_says_how_far_it_moves(
    llama: Path, data: Path, tmp_path: Path, models: list[Any]
) -> None:
    config, view = settings(llama, data, lr=None, dtype="bf16"), Sizes()
    assert config.lr_schedule == "linear"
    whole = run(config, tmp_path / "whole", view)
    assert run(config, tmp_path / "parts", Kill(5)).summary is None
    second = Sizes()
    resume(tmp_path / "parts", second)
    assert [one.moved for one in second.seen] == [one.moved for one in view.seen[5:]]
    assert same(copy_of(models[0]), copy_of(models[-1]))
    assert kept(tmp_path / "whole") == kept(tmp_path / "parts")
    assert whole.summary is not None
    assert whole.summary["lr"] is None
    contents = read(tmp_path / "whole")
    first = Budget(len(contents.header.blocks)).rate(10, "linear")
    assert [record.lr for record in contents.records] == pytest.approx([first * (1 - t / 10) for t in range(10)])
    assert Config.load(tmp_path / "whole" / "config.toml").lr is None

    said = CliRunner().invoke(app, ["inspect", str(tmp_path / "whole"), "--json"])
    blocks = json.loads(said.output)["blocks"]
    shown = {block["name"]: block["moved"] for block in blocks if block["visits"]}
    assert len(view.seen) == 10
    for name, moved in shown.items():  # the view and the journal tell the same sizes
        steps = [one.moved for one in view.seen if one.block == name]
        assert moved == pytest.approx(sum(size**2 for size in steps if size is not None) ** 0.5, rel=1e-6)
        assert 0 < moved < 3 * DISPLACEMENT
    assert f"moved by {100 * (view.seen[0].moved or 0):.2g} %" in step_line(view.seen[0], 0)
    said = CliRunner().invoke(app, ["inspect", str(tmp_path / "whole")])
    assert "moved in all" in said.output
    assert "moved in all" in (tmp_path / "whole" / "report.html").read_text()


def test_a_run_that_began_without_a_quantile_goes_on_without_it(
    llama: Path, data: Path, tmp_path: Path, models: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until 2026-11-16 the size of a vector was its root mean square."""
    config = settings(llama, data, lr=None, dtype="bf16")
    with monkeypatch.context() as before:
        before.setattr(budget, "QUANTILE", None)
        run(config, tmp_path / "whole")
        assert run(config, tmp_path / "parts", Kill(5)).summary is None
    resume(tmp_path / "parts")
    assert same(copy_of(models[0]), copy_of(models[-1]))
    assert kept(tmp_path / "whole") == kept(tmp_path / "parts")
    run(config, tmp_path / "now")
    words = [read(tmp_path / name).header.parts["subspace"] for name in ("parts", "now")]
    assert words == ["Relative(subspace=Full())", "Relative(subspace=Full(), quantile=0.1)"]


def test_with_lr_the_view_knows_the_sizes_from_the_weights(llama: Path, data: Path, tmp_path: Path) -> None:
    view = Sizes()
    run(settings(llama, data, steps=2), tmp_path / "run", view)
    about = json.loads((tmp_path / "run" / "about.json").read_text())
    rms = {block["name"]: block["rms"] for block in about["blocks"]}
    for one, record in zip(view.seen, read(tmp_path / "run").records, strict=True):
        assert one.moved == pytest.approx(abs(record.coeffs[0]) * record.lr / rms[one.block])
    assert "moved" not in CliRunner().invoke(app, ["inspect", str(tmp_path / "run")]).output


def test_the_report_knows_the_probes_that_a_method_brings(llama: Path, data: Path, tmp_path: Path) -> None:
    """The mean of eight coefficients is no coefficient: beside its own running size it is √8 times as large."""
    run(settings(llama, data, lr=None, method="fzoo_bcd", steps=10), tmp_path / "run")
    said = CliRunner().invoke(app, ["inspect", str(tmp_path / "run"), "--json"])
    shown = [f"{100 * block['moved']:.2f}" for block in json.loads(said.output)["blocks"] if block["moved"]]
    page = (tmp_path / "run" / "report.html").read_text()
    assert len(shown) > 2
    assert all(f"{moved} %" in page for moved in shown)


def test_a_method_that_brings_a_learning_rate_takes_it(llama: Path, data: Path, tmp_path: Path) -> None:
    """ZO-Muon's steps are not in units of the weights, so no budget of these is theirs."""
    config = settings(llama, data, lr=None, method="zo_muon", steps=2)
    assert (config.lr, config.eps, config.lr_schedule) == (1e-2, 1e-3, "constant")
    run(config, tmp_path / "run")
    assert [record.lr for record in read(tmp_path / "run").records] == [1e-2, 1e-2]


def test_of_steps_that_move_several_blocks_no_size_is_told(llama: Path, data: Path, tmp_path: Path) -> None:
    """The schedule is asked, and not its name: here it is one of somebody else."""

    @SCHEDULES.register
    @dataclasses.dataclass(frozen=True)
    class Pairs(Blind, Weighing):
        def choose(self, turn: int, n: int, seed: int, scores: list[float]) -> dict[int, float]:
            return {turn % n: 1.0, (turn + 1) % n: 1.0}

        def most(self, n: int) -> int:
            return 2

    try:
        view = Sizes()
        run(settings(llama, data, lr=None, steps=2, schedule="pairs"), tmp_path / "run", view)
        assert [one.moved for one in view.seen] == [None, None]
        assert "moved in all" not in CliRunner().invoke(app, ["inspect", str(tmp_path / "run")]).output
        page = (tmp_path / "run" / "report.html").read_text()
        assert "moved in all" not in page
        assert "A step moves up to 2 blocks" in page
    finally:
        del SCHEDULES["pairs"]


def test_an_adapter_that_begins_at_zero_moves(llama: Path, data: Path, tmp_path: Path, models: list[Any]) -> None:
    """By a share of the matrix beside it, times the multiple that is meant."""
    pytest.importorskip("peft")
    config = settings(llama, data, lr=None, lora="r=2,targets=q,v", steps=6, method="mezo")
    run(config, tmp_path / "run")
    layers = [module for module in models[0].modules() if hasattr(module, "get_delta_weight")]
    assert layers
    for layer in layers:
        share = root_mean_square(layer.get_delta_weight("default")) / root_mean_square(layer.get_base_layer().weight)
        assert budget.PRODUCT is not None
        assert 0.5 * DISPLACEMENT < share / budget.PRODUCT < 1.6 * DISPLACEMENT


@pytest.mark.filterwarnings("ignore:without a learning rate:zeroblock.ZeroBlockWarning")  # of a floor
def test_a_run_whose_adapter_began_with_the_floor_goes_on_with_it(
    llama: Path, data: Path, tmp_path: Path, models: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until 2026-11-18 the size of LoRA's B did not follow from the matrix."""
    pytest.importorskip("peft")
    config = settings(llama, data, lr=None, lora="r=2,targets=q,v", steps=6, dtype="bf16")
    with monkeypatch.context() as before:
        before.setattr(budget, "PRODUCT", None)
        run(config, tmp_path / "whole")
        assert run(config, tmp_path / "parts", Kill(3)).summary is None
    resume(tmp_path / "parts")
    assert same(copy_of(models[0]), copy_of(models[-1]))
    assert kept(tmp_path / "whole") == kept(tmp_path / "parts")
    run(config, tmp_path / "now")
    assert run(config, tmp_path / "stopped", Kill(3)).summary is None
    resume(tmp_path / "stopped")
    assert kept(tmp_path / "now") == kept(tmp_path / "stopped")
    words = [read(tmp_path / name).header.parts["subspace"] for name in ("parts", "now")]
    assert words == [f"Relative(subspace=Full(), quantile=0.1{more})" for more in ("", f", product={budget.PRODUCT}")]


def test_minutes_are_the_length_of_a_run_without_lr(llama: Path, data: Path, tmp_path: Path) -> None:
    """It ends evaluated, however short, where one with lr stops and can be resumed."""
    config = settings(llama, data, lr=None, max_minutes=1e-9)
    result = run(config, tmp_path / "run")
    assert (result.steps, result.reason) == (1, "")
    assert result.summary is not None
    assert run(settings(llama, data, max_minutes=1e-9), tmp_path / "other").summary is None


def test_rates_keep_the_budget_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that begin slow, as kernels are compiled, and a sitting that goes on with what is left."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    config = Config(model="m", task="t", steps=10_000, max_minutes=10.0)
    taken: list[float] = []
    for end in (300.0, 900.0):  # stopped half way through its ten minutes, and resumed for ten more
        rates = Rates(config, Budget(4), now + 600.0, taken)
        while now < end:
            taken.append(rates.at(len(taken)))
            now += 5.0 if len(taken) < 3 else 1.0
    spent = sum(lr * lr for lr in taken) / 4
    assert spent**0.5 == pytest.approx(DISPLACEMENT, rel=0.01)
    assert taken[-1] < 0.1 * max(taken)
    assert max(taken) < DISPLACEMENT


@pytest.mark.parametrize("slow", [{0: 20.0}, {0: 5.0, 1: 5.0}, dict.fromkeys(range(32), 0.1)])
def test_steps_that_compile_do_not_spend_the_budget(monkeypatch: pytest.MonkeyPatch, slow: dict[int, float]) -> None:
    """Five minutes of 10 ms per step, after a few that take up to two thousand times as long."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    blocks, rates = 32, Rates(Config(model="m", task="t", steps=10**6, max_minutes=5.0), Budget(32), 300.0)
    taken: list[float] = []
    while now < 300.0:
        taken.append(rates.at(len(taken)))
        now += slow.get(len(taken) - 1, 0.01)
    ideal = Budget(blocks).rate(len(taken), "linear")
    spent = [lr * lr / blocks for lr in taken]
    assert sum(spent) ** 0.5 == pytest.approx(DISPLACEMENT, rel=0.01)
    assert max(taken) < 3.5 * ideal
    assert sum(spent[: len(spent) // 20]) < 0.3 * DISPLACEMENT**2  # ideally 14 %


@pytest.mark.parametrize("schedule", ["economical:0.2,0.6,2,1", "economical", "proportional"])
def test_a_resumed_run_of_minutes_spends_what_is_left_of_the_budget(
    llama: Path, data: Path, tmp_path: Path, schedule: str
) -> None:
    """Records hold rates with the schedule's weights, and the budget knows them without."""
    config = settings(llama, data, lr=None, steps=10_000, eval_every=10_000, max_minutes=0.03)
    config = config.replace(schedule=schedule)
    assert run(config, tmp_path, Kill(30)).summary is None
    before = read(tmp_path).records
    assert resume(tmp_path).summary is not None
    contents = read(tmp_path)
    after = contents.records[len(before) :]
    assert 0.1 * before[-1].lr < max(record.lr for record in after[:10]) < 10 * before[-1].lr


def test_rates_without_the_weights_of_a_schedule() -> None:
    model = Tiny()
    optimizer = zb.mezo_bcd(model, lr=0.0, schedule=Economical((1.0, 9.0, 4.0, 2.0, 1.0)))
    records: list[Any] = []
    optimizer.listener = records.append
    for step in range(12):
        optimizer.lr = 1e-3 * (step + 1)
        optimizer.step(next_token(model))
    assert len({round(record.lr / (step + 1), 9) for step, record in enumerate(records)}) > 3
    assert unweighted(optimizer.turns, records) == pytest.approx([1e-3 * (step + 1) for step in range(12)])


@pytest.mark.parametrize(("change", "message"), [({"method": "ft"}, "ft needs"), ({"as_published": True}, "give --lr")])
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ZeroBlockError, match=message):
        Config.of({"model": "m", "task": "t", "method": "mezo", **change})
