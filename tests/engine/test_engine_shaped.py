"""Methods that shape their directions, forked: three and more points per step, and frames beside a product."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from decoder import BATCH, LABELS, decoder

import zeroblock as zb
from zeroblock.engine import Engine

BUILDS: dict[str, Callable[..., zb.ZeroOrder]] = {
    "hizoo": functools.partial(zb.hizoo, lr=1e-3, alpha=1e-3),
    "conmezo": functools.partial(zb.conmezo, lr=1e-3),
    "subzero": functools.partial(zb.subzero, lr=1e-3, rank=4, interval=2),
    "subzero, folded": functools.partial(zb.subzero, lr=1e-3, rank=4, interval=2, fold=2),
    "zo_muon": functools.partial(zb.zo_muon, lr=1e-3, rank=4, interval=2),
}


@pytest.mark.parametrize("partition", [zb.whole, zb.layers])
@pytest.mark.parametrize("name", BUILDS)
def test_forked_is_sequential(name: str, partition: Callable[..., object]) -> None:
    runs = []
    for forked in (True, False):
        model = decoder("opt")
        engine = Engine(model)
        assert engine.forked
        objective = engine.objective(BATCH, LABELS, "options")
        optimizer = BUILDS[name](model, partition=partition)
        records: list[zb.Record] = []
        optimizer.listener = records.append
        for _ in range(4):
            optimizer.step(objective if forked else (lambda: objective()))  # noqa: B023
        runs.append(records)
    for ours, theirs in zip(*runs, strict=True):
        assert ours.losses == pytest.approx(theirs.losses, abs=1e-5)
        assert max(ours.losses) > min(ours.losses)
