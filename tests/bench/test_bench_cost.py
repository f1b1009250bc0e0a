"""The time of a step by block, and its prediction: a row for every block, and weights that come out as they were."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from bench_model import build, pool

from zeroblock.bench import cost, row


def test_every_block_has_a_row(tmp_path: Path) -> None:
    model = build("Llama")
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    rows = cost.table(model, pool(), ("tiny", "sst2"), batch_size=4, rounds=1, hold=True)
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    names = [one.name for one in rows if not one.held]
    assert names == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    assert names == [one.name for one in rows if one.held]
    assert [one.prefix for one in rows[:5]] == [0, 0, 0.5, 1, 1]
    assert all(one.median_ms > 0 and one.fitted for one in rows)  # five blocks tell the costs of five
    assert json.dumps(one := rows[0].__dict__)
    assert one["weights"] == 50 * 32
    row.append(tmp_path / "cost.csv", rows, cost.CostRow)
    assert len((tmp_path / "cost.csv").read_text().splitlines()) == 11
    assert "the largest error is" in cost.text(rows)
