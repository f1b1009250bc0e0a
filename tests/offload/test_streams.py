"""Copies and kernels in every order that a GPU may choose: the weights are the same, and nothing races."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from decoder import BATCH, LABELS
from stream_model import modelled
from test_streamed import LAYERS, build, lozo, steps, streamed

import zeroblock as zb
from toy import same, snapshot
from zeroblock.engine import Engine


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("buffers", [3, 4])
@pytest.mark.parametrize("method", [zb.mezo_bcd, zb.mezo, lozo, zb.mezo_bcd_adam])
def test_late_copies_and_late_kernels(method: Callable[..., zb.ZeroOrder], buffers: int, pinned: bool) -> None:
    known, model = build(dtype=torch.bfloat16), build(dtype=torch.bfloat16)
    expected = steps(known, method(known, lr=1e-2), 5)
    shelf = streamed(model)
    with modelled(shelf, buffers, pinned):
        records = steps(model, method(model, lr=1e-2), 5)
        assert same(snapshot(model), snapshot(known))
    assert [(r.losses, r.coeffs) for r in records] == [(r.losses, r.coeffs) for r in expected]


def test_a_layer_comes_while_the_one_before_it_runs() -> None:
    """Before the active block, with it, and after it; and those of the next step while the host waits for this one."""
    model = build()
    shelf = streamed(model)
    engine, optimizer = Engine(model), zb.mezo_bcd(model, lr=1e-2, schedule=zb.Ascending())
    objective = engine.objective(BATCH, LABELS)
    with modelled(shelf, 3) as machine:
        optimizer.step(objective)
        for _ in range(1 + LAYERS):  # positions, then every layer is the active one once
            machine.arrivals.clear()
            optimizer.step(objective)
            assert {one.layer for one in machine.arrivals} == set(range(LAYERS))
            for before, layer in itertools.pairwise(machine.arrivals):
                assert layer.waited <= before.launched
