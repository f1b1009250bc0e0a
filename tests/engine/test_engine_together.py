"""Steps whose tensors take their noise in one launch end where those of a launch each do, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoder import BATCH, LABELS, decoder

import zeroblock as zb
from toy import Tiny, next_token, same, snapshot
from zeroblock.engine import Engine
from zeroblock.ops.noise import together as launches

triton = pytest.importorskip("zeroblock.ops.noise.triton")
METHODS = {"mezo_bcd": {"lr": 1e-2, "weight_decay": 0.1}, "mezo_bcd without lr": {"probes": 2}}


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function after which tensors go together without a GPU, too; it returns the sizes of the groups."""
    launched: list[int] = []
    launch = triton.add_noise_together_

    def noted(parts: Any, *args: Any) -> None:
        launched.append(len(parts))
        launch(parts, *args)

    def join() -> list[int]:
        monkeypatch.setattr(launches, "backend", lambda operation, device: triton)
        monkeypatch.setattr(triton, "add_noise_together_", noted)
        return launched

    return join


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("forked", [True, False])
def test_a_step_of_joint_launches(name: str, dtype: torch.dtype, forked: bool, joined: Any) -> None:
    runs, launched = [], None
    for together in (False, True):
        launched = joined() if together else None
        model = decoder("llama", dtype) if forked else Tiny(dtype=dtype)
        before = snapshot(model)
        optimizer = zb.METHODS[name.split()[0]](model, **METHODS[name])
        objective = Engine(model).objective(BATCH, LABELS) if forked else next_token(model)
        losses = [float(optimizer.step(objective)) for _ in range(2)]
        runs.append((losses, snapshot(model)))
        assert not same(before, snapshot(model))
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])
    assert launched is not None
    assert len(launched) >= 2  # a measurement and an update
    assert max(launched) > 1
