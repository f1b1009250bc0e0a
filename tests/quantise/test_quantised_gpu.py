"""Integers on a GPU: captured steps are the steps, and their records rebuild the integers on the CPU."""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path

import pytest
import torch

import zeroblock as zb
from zeroblock.engine import Engine
from zeroblock.quantise import quantise_

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from decoder import BATCH, LABELS, decoder

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("method", ["mezo_bcd", "mezo"])
@pytest.mark.parametrize(("name", "kind"), [("opt", "int8"), ("opt", "int4"), ("qwen2", "int4")])
def test_captured_steps_rebuild_the_integers_on_the_cpu(name: str, kind: str, method: str, dtype: torch.dtype) -> None:
    base = quantise_(decoder(name, dtype), kind)
    build = functools.partial(zb.METHODS[method], lr=1e-2, eps=1e-2, seed=3)
    runs, ends = [], []
    for graphs in (True, False):
        model, records = copy.deepcopy(base).cuda(), []
        engine, optimizer = Engine(model, graphs=graphs), build(model)
        optimizer.listener = records.append
        for _ in range(12):
            optimizer.step(engine.objective(BATCH, LABELS))
        optimizer.flush()
        assert (engine.graphs is not None and engine.graphs.captures > 0) == graphs
        runs.append(records)
        ends.append([param.detach().cpu().view(torch.uint8) for param in model.parameters()])
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for captured, eager in zip(*runs, strict=True):
        assert captured.losses == pytest.approx(eager.losses, abs=tolerance)
    for records, end in zip(runs, ends, strict=True):
        again = copy.deepcopy(base)
        zb.replay(build(again), records)
        assert all(map(torch.equal, (param.detach().view(torch.uint8) for param in again.parameters()), end))
