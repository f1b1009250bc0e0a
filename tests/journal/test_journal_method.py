"""Every method: a journal and the base give the weights of any step, bit for bit."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from journal_toy import build, key
from torch import nn

import zeroblock as zb
from toy import Tiny, next_token, same, snapshot
from zeroblock.journal import Header, Journal, read, replay

MIDDLE, END = 13, 18  # turns end after 7 and 14 steps
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "three probes, decay, clipped": {"probes": 3, "weight_decay": 0.01, "clip": 0.05},
}


def follow(build: Any, path: Path, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Run with a changing rate and a skipped step, rebuild its middle and its end, go on a step: both weights."""
    model = Tiny(dtype=dtype)
    optimizer, loss, records = build(model), next_token(model), []
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=END)
    with Journal.create(path, Header.of(optimizer, model="tiny")) as journal:
        for step in range(END):
            if step == 11:
                with pytest.warns(zb.ZeroBlockWarning, match="not finite"):
                    optimizer.step(lambda: float("nan"))
            else:
                optimizer.step(loss)
            journal.append(optimizer.record)
            records.append(optimizer.record)
            scheduler.step()
            if step == MIDDLE - 1:
                middle = snapshot(model)
    contents = read(path)
    assert contents.torn == 0
    assert all(key(a) == key(b) for a, b in zip(contents.records[:11], records[:11], strict=True))
    assert all(key(a) == key(b) for a, b in zip(contents.records[12:], records[12:], strict=True))
    assert not contents.records[11].finite
    again = Tiny(dtype=dtype)
    rebuilt = contents.header.rebuild(again)
    assert rebuilt.blocks == optimizer.blocks
    assert {**rebuilt.parts, "partition": ""} == {**optimizer.parts, "partition": ""}
    with pytest.warns(zb.ZeroBlockWarning, match="step 11"):
        replay(rebuilt, contents.records[:MIDDLE])
    assert same(snapshot(again), middle)
    replay(rebuilt, contents.records[MIDDLE:])
    assert same(snapshot(again), snapshot(model))
    assert not same(snapshot(again), middle)
    # the losses, which the file does not store, come out to a part of what a perturbation changes
    told = isinstance(
        optimizer.estimator, (zb.TwoSided, zb.OneSided, zb.Curvature)
    )  # others shape coefficients further
    for ours, theirs in zip(records, contents.records, strict=True):
        if not told:
            assert theirs.losses == ()
        elif ours.finite:
            assert theirs.losses == pytest.approx(ours.losses, abs=1e-6 * 1e-3 * max(map(abs, ours.coeffs)) + 1e-15)
    # and the run goes on as if it had never stopped
    optimizer.step(loss)
    rebuilt.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
    rebuilt.step(next_token(again))
    assert rebuilt.record == optimizer.record
    return snapshot(again), snapshot(model)


CASES = [(variant, dtype) for dtype in (torch.bfloat16, torch.float32) for variant in VARIANTS]


@pytest.mark.parametrize(("name", "case"), zip(zb.METHODS, itertools.cycle(CASES), strict=False))
def test_base_and_journal_are_the_weights(name: str, case: tuple[str, torch.dtype], tmp_path: Path) -> None:
    """Every method in one variant and dtype; test_method replays it in others."""
    variant, dtype = case
    assert same(*follow(functools.partial(build, name, **VARIANTS[variant]), tmp_path / "journal.zbj", dtype))


def halves(model: nn.Module) -> tuple[zb.Block, ...]:
    """A partition of one's own."""
    names = [name for name, _ in model.named_parameters()]
    return zb.Block("lower", tuple(names[:6])), zb.Block("upper", tuple(names[6:]))


OTHERS: dict[str, Any] = {
    "a partition of one's own": functools.partial(zb.mezo_bcd, lr=1e-2, partition=halves),
    "in place, as MeZO": functools.partial(zb.mezo, lr=1e-2, as_published=True),
    "stale U, as LOZO": functools.partial(zb.lozo, lr=1e-3, interval=4, as_published=True),
    "signed scores, as published": functools.partial(zb.mezo_bcd_adaptive, lr=1e-2, as_published=True),
    "adaptive from the third turn": functools.partial(
        zb.mezo_bcd_adaptive, lr=1e-2, schedule=zb.Adaptive(warmup=3, temperature=0.5), interval=2
    ),
    "pairs of layers, one-sided": functools.partial(
        zb.ZeroOrder, lr=1e-2, partition=functools.partial(zb.layers, k=2), estimator=zb.OneSided(1e-3, 2)
    ),
    "own blocks, Bernoulli, signs": lambda model: zb.ZeroOrder(
        model,
        lr=1e-2,
        partition=[[n for n, _ in model.named_parameters()][::2], [n for n, _ in model.named_parameters()][1::2]],
        subspace=zb.Bernoulli(0.5),
        distribution=zb.Distribution.RADEMACHER,
        rounding=zb.Rounding.NEAREST,
        schedule=zb.FlipFlop(),
        interval=3,
        seed=2**64 - 1,
    ),
    "decay of chosen weights": lambda model: zb.mezo(
        model, lr=1e-2, weight_decay=0.1, decays=lambda name, param: "up" in name
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_other_compositions_too(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    assert same(*follow(OTHERS[name], tmp_path / "journal.zbj", dtype))


def test_frozen_weights_are_frozen_again(tmp_path: Path) -> None:
    def frozen(model: nn.Module) -> nn.Module:
        model.layers[1].requires_grad_(False)
        return model

    model = frozen(Tiny())
    optimizer = zb.mezo_bcd(model, 1e-2)
    with Journal.create(tmp_path / "journal.zbj", Header.of(optimizer)) as journal:
        for _ in range(6):
            optimizer.step(next_token(model))
            journal.append(optimizer.record)
    contents = read(tmp_path / "journal.zbj")
    again = Tiny()
    replay(contents.header.rebuild(again), contents.records)
    assert same(snapshot(again), snapshot(model))
    assert not any(p.requires_grad for p in again.layers[1].parameters())
    with pytest.raises(zb.ZeroBlockError, match="written with number of blocks 4, this optimizer has 5"):
        contents.header.check(zb.mezo_bcd(Tiny(), 1e-2))


def test_a_run_that_gave_up_can_be_rebuilt(tmp_path: Path) -> None:
    model = Tiny()
    optimizer = zb.mezo_bcd(model, 1e-2, patience=3)
    journal = Journal.create(tmp_path / "journal.zbj", Header.of(optimizer))
    optimizer.listener = journal.append
    with journal:
        optimizer.step(next_token(model))
        with pytest.warns(zb.ZeroBlockWarning, match="not finite"):
            optimizer.step(lambda: float("inf"))
        optimizer.step(lambda: float("nan"))
        with pytest.raises(zb.ZeroBlockError, match="3 steps in a row"):
            optimizer.step(lambda: float("nan"))
    contents = read(tmp_path / "journal.zbj")
    assert [record.finite for record in contents.records] == [True, False, False, False]
    again = Tiny()
    rebuilt = contents.header.rebuild(again)
    with pytest.warns(zb.ZeroBlockWarning):
        replay(rebuilt, contents.records)
    assert same(snapshot(again), snapshot(model))
    assert rebuilt.skipped == 3
