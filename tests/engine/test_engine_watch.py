"""An engine of another model is noticed; the engine of this one is not suspected."""

from __future__ import annotations

import copy

import pytest
import torch
from decoder import BATCH, LABELS, decoder

import zeroblock as zb
from zeroblock.engine import Engine
from zeroblock.run.graph import Graphs
from zeroblock.watch import ZERO_STEPS


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return decoder("llama-tied")


def test_the_engine_of_another_model_is_an_error(model: torch.nn.Module) -> None:
    objective = Engine(copy.deepcopy(model)).objective(BATCH, LABELS)
    for optimizer in (zb.mezo_bcd(model, 1e-2), zb.mezo(model, 1e-2), zb.lozo(model, 1e-2)):
        with pytest.raises(zb.ZeroBlockError, match="read none of the model's weights"):
            optimizer.step(objective)


@pytest.mark.parametrize("fork", [True, False])
def test_steps_too_small_to_see_are_no_error(model: torch.nn.Module, fork: bool) -> None:
    """Every coefficient is zero, but every weight is read."""
    objective = Engine(model, fork=fork).objective(BATCH, LABELS)
    for optimizer in (
        zb.mezo_bcd(model, 0.0, eps=1e-30),
        zb.mezo(model, 0.0, eps=1e-30),
        zb.mezo_bcd(model, 0.0, eps=1e-30, partition=zb.linears, subspace=zb.LowRank(2)),
    ):
        for _ in range(len(optimizer.blocks) if fork else 3):
            optimizer.step(objective)
            assert not any(optimizer.record.coeffs)


def test_submitted_steps_are_watched_too(model: torch.nn.Module, late: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graphs, "pays", staticmethod(lambda tokens, weights: False))
    engine, other = Engine(model), Engine(copy.deepcopy(model))
    engine.graphs = other.graphs = Graphs()
    optimizer = zb.mezo_bcd(model, 0.0, eps=1e-30)
    for _ in range(ZERO_STEPS + 2):
        optimizer.step(engine.objective(BATCH, LABELS))
    assert optimizer._queue
    optimizer.flush()
    optimizer = zb.mezo_bcd(model, 1e-2)
    with pytest.raises(zb.ZeroBlockError, match="read none of the model's weights"):
        optimizer.step(other.objective(BATCH, LABELS))


def test_a_block_that_the_model_never_reads_is_named() -> None:
    model = decoder("llama")
    model.requires_grad_(False)
    model.spare = torch.nn.Linear(2, 2)
    optimizer = zb.mezo_bcd(model, 0.0, partition=zb.whole)
    with pytest.warns(zb.ZeroBlockWarning, match=r"reads no weight of the block of 'spare.weight'"):
        optimizer.step(Engine(model).objective(BATCH, LABELS))
    assert optimizer.record.coeffs == (0.0,)
