"""An economical run measures what steps cost when it begins, and keeps the costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loop_toy import Kill, settings

from zeroblock import Economical
from zeroblock.journal import read
from zeroblock.schedule import COSTS_ALONE, by_name
from zeroblock.train import Config, make, price, run
from zeroblock.train.workload import prepare, resolve


def test_costs_are_measured_once_and_kept(
    opt: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(opt, data, schedule="economical")
    assert run(config, tmp_path / "run", Kill(5)).steps < config.steps
    kept = Config.load(tmp_path / "run" / "config.toml").schedule
    schedule = by_name(kept)
    assert isinstance(schedule, Economical)
    assert len(schedule.costs) == len(read(tmp_path / "run").header.blocks) == 5
    assert sum(schedule.costs) == pytest.approx(5, rel=0.2)
    monkeypatch.setattr(price, "measured", None)  # not again
    assert make(config, tmp_path / "run").steps == config.steps
    records = read(tmp_path / "run").records
    again = run(config.replace(schedule=kept), tmp_path / "again")
    assert list(records) == list(read(again.folder).records)
    assert len({record.lr for record in records}) > 1


@pytest.mark.parametrize(
    ("change", "decay"), [({"lr": None}, 0.0), ({"lr": 1e-3}, 0.1), ({"method": "mezo_bcd_adam"}, 0.0)]
)
def test_without_a_scale_of_steps_the_costs_alone_decide(
    llama: Path, data: Path, tmp_path: Path, change: dict[str, Any], decay: float
) -> None:
    """Where all steps have one size; a run that began before this was known goes on as it began."""
    config = settings(llama, data, schedule="economical", **change)
    run(config, tmp_path / "run", Kill(3))
    kept = Config.load(tmp_path / "run" / "config.toml").schedule
    schedule = by_name(kept)
    assert isinstance(schedule, Economical)
    assert schedule.decay == decay
    assert make(config, tmp_path / "run").summary is not None
    earlier = config.replace(schedule=kept.removesuffix(COSTS_ALONE))
    run(earlier, tmp_path / "earlier", Kill(3))
    assert make(config, tmp_path / "earlier").summary is not None
    assert read(tmp_path / "earlier").header.parts["schedule"].count("decay=0.1") == 1


def test_measuring_leaves_the_weights_alone(llama: Path, data: Path) -> None:
    workload = prepare(resolve(settings(llama, data, schedule="economical", dtype="bf16")))
    before = {name: param.detach().clone() for name, param in workload.model.named_parameters()}
    said: list[str] = []
    price.priced(workload, said.append)
    assert all(torch.equal(param, before[name]) for name, param in workload.model.named_parameters())
    assert "4 blocks" in said[0]
    assert "times the mean" in said[1]
