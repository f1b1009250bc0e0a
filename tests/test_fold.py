"""Steps that are held in coordinates are the same steps: only when they reach the weights differs."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroblock as zb
from toy import Tiny, bits, next_token, same, snapshot
from zeroblock import fused
from zeroblock.basis import Factored, Site
from zeroblock.journal import Header, Journal, Record, read, replay
from zeroblock.noise import Distribution, Key, Rounding
from zeroblock.run import host
from zeroblock.step import Called

COMPOSITIONS: dict[str, Any] = {
    "lozo": functools.partial(zb.lozo, lr=1e-2, interval=6),
    "lozo_m": functools.partial(zb.lozo_m, lr=1e-2, interval=6),
    "lozo_m that forgets": functools.partial(zb.lozo, lr=1e-2, interval=6, rule=zb.Momentum(reset=True)),
    "Adam": functools.partial(zb.lozo, lr=1e-3, interval=6, rule=zb.Adam()),
    "three probes, rank 1": functools.partial(zb.lozo, lr=1e-2, interval=6, probes=3, rank=1),
    "stale U": functools.partial(zb.lozo, lr=1e-2, interval=6, as_published=True),
    "clipped signs": functools.partial(
        zb.lozo, lr=1e-2, interval=6, clip=0.1, distribution=Distribution.RADEMACHER
    ),
    "one-sided layers": functools.partial(
        zb.ZeroOrder, lr=1e-2, subspace=zb.LowRank(2), interval=6, estimator=zb.OneSided(1e-3, 2)
    ),
}  # fmt: skip
every_composition = pytest.mark.parametrize("name", COMPOSITIONS)


def taken(optimizer: zb.ZeroOrder, model: nn.Module, steps: int) -> list[Record]:
    records = []
    for _ in range(steps):
        optimizer.step(next_token(model))
        records.append(optimizer.record)
    return records


def matrices(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param for name, param in snapshot(model).items() if param.dim() > 1}


@functools.cache
def whole_run(
    name: str, dtype: torch.dtype, steps: int, **options: int
) -> tuple[list[Record], dict[str, torch.Tensor]]:
    """Records and last weights of a run that several tests are compared with."""
    model = Tiny(dtype=dtype)
    return taken(COMPOSITIONS[name](model, **options), model, steps), snapshot(model)


@every_composition
@pytest.mark.parametrize("fold", [2, 3, 6])
def test_folded_steps_are_the_steps_themselves(name: str, fold: int) -> None:
    """Losses, coefficients and weights to round-off, over three turns."""
    other = Tiny()
    plain, weights = whole_run(name, torch.float32, 18)
    folded = taken(COMPOSITIONS[name](other, fold=fold), other, 18)
    for one, two in zip(folded, plain, strict=True):
        assert one.block == two.block
        assert one.losses == pytest.approx(two.losses, abs=5e-5)
    for name, weight in snapshot(other).items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=2e-4)


@every_composition
def test_matrices_move_with_every_fold_and_vectors_with_every_step(name: str) -> None:
    model = Tiny()
    optimizer = COMPOSITIONS[name](model, fold=3)
    for step in range(1, 13):
        block, whole = optimizer.block, snapshot(model)
        optimizer.step(next_token(model))
        moved = {n for n, weight in snapshot(model).items() if not torch.equal(weight, whole[n])}
        active = set(optimizer.blocks[block].params)
        assert moved <= active
        assert moved & set(whole).difference(matrices(model)) == active.difference(matrices(model))
        assert moved & set(matrices(model)) == (set() if step % 3 else active & set(matrices(model)))


@every_composition
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_measuring_changes_neither_weights_nor_what_is_held(name: str, dtype: torch.dtype) -> None:
    model = Tiny(dtype=dtype)
    optimizer = COMPOSITIONS[name](model, fold=6)
    taken(optimizer, model, 4)
    weights = snapshot(model)
    before = {**weights, **optimizer.state_dict()["held"]}
    storage = {n: p.data for n, p in model.named_parameters()}

    def objective() -> torch.Tensor:
        assert same(storage, weights)
        return next_token(model)()

    losses = host.measure(optimizer.plan(), Called(objective)).losses.tolist()
    assert len(set(losses)) == len(losses)
    assert same({**snapshot(model), **optimizer.state_dict()["held"]}, before)
    with pytest.raises(RuntimeError, match="in the middle"):
        optimizer.step(lambda: (_ for _ in ()).throw(RuntimeError("in the middle")))
    assert same({**snapshot(model), **optimizer.state_dict()["held"]}, before)


@pytest.mark.parametrize("estimator", [zb.TwoSided(1e-2), zb.OneSided(1e-2)], ids=str)
@pytest.mark.parametrize("partition", [zb.whole, zb.layers])
def test_a_direction_starts_where_the_steps_have_come_to(estimator: Any, partition: Any) -> None:
    """At scale nought it shows what settle makes of the weights; a step is measured there, not where they lag."""
    model, other = Tiny(), Tiny()
    build = functools.partial(
        zb.ZeroOrder, lr=0.1, partition=partition, subspace=zb.LowRank(2), interval=5, fold=5, estimator=estimator
    )
    optimizer, again = build(model), build(other)
    records = taken(optimizer, model, 3)
    replay(again, records)
    lagging = float(next_token(model)())
    with optimizer.plan().directions[0] as direction:
        direction.move(0.0)
        shown = float(next_token(model)())
    assert float(next_token(model)()) == lagging
    again.settle()
    assert float(next_token(other)()) == pytest.approx(shown, abs=1e-6)
    assert abs(shown - lagging) > 1e-3


def test_sixteen_bits_lose_less() -> None:
    """Steps below half a unit, rounded to nearest: one by one they are lost, their sum is not."""
    ends = []
    for dtype, fold in [(torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 50)]:
        model = Tiny().to(torch.bfloat16).to(dtype)
        start = matrices(model)
        optimizer = zb.lozo(model, 1.0, rounding=Rounding.NEAREST, fold=fold)
        for step in range(50):
            replay(optimizer, [Record(step, 0, (1e-4,), 1.0, (), 1.0)])
        ends.append({name: (weight - start[name]).float() for name, weight in matrices(model).items()})
    exact, stepwise, folded = (torch.cat([moved.flatten() for moved in end.values()]) for end in ends)
    assert (folded - exact).norm() < 0.7 * (stepwise - exact).norm()
    assert stepwise.count_nonzero() < folded.count_nonzero()


@every_composition
@pytest.mark.parametrize("stop", [6, 11])
def test_a_state_goes_on_within_a_fold(name: str, stop: int) -> None:
    _, expected = whole_run(name, torch.bfloat16, 15, fold=6)
    other = Tiny(dtype=torch.bfloat16)
    first = COMPOSITIONS[name](other, fold=6)
    taken(first, other, stop)
    state = first.state_dict()
    taken(first, other, 7)  # what comes later is not in it
    weights = Tiny(dtype=torch.bfloat16)
    again = COMPOSITIONS[name](weights, fold=6)
    taken(again, weights, stop)
    at = snapshot(weights)
    taken(again, weights, 5)
    with torch.no_grad():
        for key, param in weights.named_parameters():
            param.copy_(at[key])
    again.load_state_dict(state)
    taken(again, weights, 15 - stop)
    assert same(snapshot(weights), expected)


@every_composition
def test_a_journal_gives_the_same_weights(name: str, tmp_path: Path) -> None:
    """From the file alone, to the end and between folds; a step without a loss is in it too."""
    model = Tiny(dtype=torch.bfloat16)
    optimizer = COMPOSITIONS[name](model, fold=3)
    states = []
    with Journal.create(tmp_path / "journal.zbj", Header.of(optimizer)) as journal, pytest.warns(zb.ZeroBlockWarning):
        for step in range(11):
            optimizer.step((lambda: float("nan")) if step == 4 else next_token(model))
            journal.append(optimizer.record)
            states.append({**snapshot(model), **optimizer.state_dict()["held"]})
    contents = read(tmp_path / "journal.zbj")
    assert contents.header.parts["fold"] == "3"
    with pytest.warns(zb.ZeroBlockWarning):
        for count in (11, 9, 4):
            again = Tiny(dtype=torch.bfloat16)
            rebuilt = contents.header.rebuild(again)
            replay(rebuilt, contents.records[:count])
            assert same({**snapshot(again), **rebuilt.state_dict()["held"]}, states[count - 1])
        loaded, base = Tiny(dtype=torch.bfloat16), snapshot(Tiny(dtype=torch.bfloat16))
        zb.load(loaded, tmp_path / "journal.zbj")
    optimizer.settle()
    assert same(snapshot(loaded), snapshot(model))
    zb.unload(loaded)
    assert same(snapshot(loaded), base)
    with pytest.raises(zb.ZeroBlockError, match="written with fold 3, this optimizer has None"):
        contents.header.check(COMPOSITIONS[name](Tiny(dtype=torch.bfloat16)))


def test_what_is_held_is_fp32_whatever_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    model, again = Tiny(), Tiny()
    torch.set_default_dtype(torch.bfloat16)
    try:
        records = taken(zb.lozo(model, 1e-2, interval=4, fold=4), model, 8)
    finally:
        torch.set_default_dtype(torch.float32)
    replay(zb.lozo(again, 1e-2, interval=4, fold=4), records)
    assert same(snapshot(again), snapshot(model))


@pytest.mark.parametrize("rounding", Rounding)
def test_with_nothing_held_copies_are_those_of_steps_that_are_not(rounding: Rounding) -> None:
    """Their rounding is mirrored too: as far to one side of the weights as to the other."""
    weights = Tiny(dtype=torch.bfloat16).layers[0]["up"].weight
    plain = zb.LowRank(2).basis(weights, Key(3, 0), Site(8, rounding=rounding))
    holding = dataclasses.replace(plain, held=torch.zeros(weights.shape[0], 2))
    for eps in (1e-2, -1e-2):
        copies = [basis.perturbed(weights, Key(3, 1), eps) for basis in (plain, holding)]
        assert torch.equal(bits(copies[0]), bits(copies[1]))


def test_loading_leaves_no_trace_on_unloading(tmp_path: Path) -> None:
    """Not even on the sign of a zero that no step moved."""
    model = Tiny()
    with torch.no_grad():
        model.embed.weight.fill_(-0.0)
    before = snapshot(model)
    with Journal.create(tmp_path / "journal.zbj", Header.of(zb.lozo(model, 1e-2, interval=4, fold=2))) as journal:
        for step in range(3):
            journal.append(Record(step, 0, (float("nan"),), 1e-2, (), 1.0))
    with pytest.warns(zb.ZeroBlockWarning):
        zb.load(model, tmp_path / "journal.zbj")
    zb.unload(model)
    assert same(snapshot(model), before)


def steps_of(visits: dict[int, list[Record]]) -> list[int]:
    return sorted(record.step for records in visits.values() for record in records)


@pytest.mark.parametrize(("start", "dtype"), [(0, torch.float16), (2, torch.float32)], ids=str)
def test_a_fused_replay_takes_whole_folds(start: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun and ended within a fold, and with a step without a loss: those folds are walked, the others fused."""
    model, again = Tiny(dtype=dtype), Tiny(dtype=dtype)
    build = functools.partial(
        zb.ZeroOrder, lr=1e-2, partition=zb.layers, subspace=zb.LowRank(2), interval=6, fold=3,
        estimator=zb.TwoSided(1e-3, 2),
    )  # fmt: skip
    optimizer, other = build(model), build(again)
    records = [Record(t, 0, (0.3 * t - 1, 0.2), 1e-2 / (t + 1), (), 1.0) for t in range(20)]
    fresh = build(Tiny(dtype=dtype))
    order = [fresh.schedule.pick(t // 6, len(fresh.blocks), fresh.seed, list(fresh.scores)) for t in range(20)]
    records = [Record(r.step, order[r.step], r.coeffs, 0.0 if r.step in (1, 7, 16) else r.lr, (), 1.0) for r in records]
    records[13] = Record(13, order[13], (float("nan"),) * 2, 1e-2, (), 1.0)
    with pytest.warns(zb.ZeroBlockWarning):
        replay(optimizer, records)
        replay(other, records[:start])
        advance, parts = fused.advance, []
        monkeypatch.setattr(fused, "serves", lambda optimizer: True)
        monkeypatch.setattr(fused, "MAX_FOLDS", 1 if start else fused.MAX_FOLDS)  # as many launches as folds
        monkeypatch.setattr(fused, "advance", lambda *a: (parts.append(steps_of(a[1])), advance(*a)))
        replay(other, records[start:])
    assert parts == [[*range(3 if start else 0, 12)], [15, 16, 17]]
    assert same(snapshot(again), snapshot(model))
    assert optimizer.state_dict()["held"].keys() == other.state_dict()["held"].keys()
    assert same(other.state_dict()["held"], optimizer.state_dict()["held"])


def test_settling_is_the_end() -> None:
    model = Tiny()
    optimizer = zb.lozo(model, 1e-2, interval=4, fold=4)
    taken(optimizer, model, 4)
    before, state = snapshot(model), optimizer.state_dict()
    optimizer.settle()  # at a fold there is nothing to do
    assert same(snapshot(model), before)
    taken(optimizer, model, 1)
    optimizer.settle()
    settled = snapshot(model)
    assert not same(settled, before)
    optimizer.settle()
    assert same(snapshot(model), settled)
    with pytest.raises(zb.ZeroBlockError, match="take steps and states before"):
        optimizer.state_dict()
    with pytest.raises(zb.ZeroBlockError, match=r"settled at step 5, between two folds.*multiple of fold=4"):
        optimizer.step(next_token(model))
    assert same(snapshot(model), settled)
    optimizer.load_state_dict(state)  # with weights of its own, it goes on
    optimizer.step(next_token(model))
    assert optimizer.steps == 5


def test_an_error_within_a_fold_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some matrices are at θ then and others are not: no step may follow."""
    model = Tiny()
    optimizer = zb.lozo(model, 1e-2, interval=4, fold=2)
    taken(optimizer, model, 2)
    state, weights = optimizer.state_dict(), snapshot(model)
    fold, calls = Factored.fold_, []

    def failing(self: Factored, *arguments: Any) -> None:
        calls.append(self)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no room")
        fold(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Factored, "fold_", failing)
        with pytest.raises(torch.OutOfMemoryError):
            taken(optimizer, model, 2)
    for use in (lambda: optimizer.step(next_token(model)), optimizer.state_dict):
        with pytest.raises(zb.ZeroBlockError, match=r"an error interrupted a fold.*load an earlier state"):
            use()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(weights[name])
    optimizer.load_state_dict(state)
    taken(optimizer, model, 4)
    whole = Tiny()
    taken(zb.lozo(whole, 1e-2, interval=4, fold=2), whole, 6)
    assert same(snapshot(model), snapshot(whole))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fold": 0}, "fold must be a whole number and at least 1"),
        ({"fold": 1.5}, "fold must be a whole number"),
        ({"fold": 4}, "fold 4 does not divide the interval of 6.*give fold 3, or interval 8"),
        ({"fold": 12}, "fold 12 does not divide the interval of 6.*give fold 6, or interval 12"),
        ({"fold": 3, "weight_decay": 0.1}, "leave out fold or weight_decay"),
        ({"fold": 3, "subspace": zb.Full()}, "fold is for low-rank steps.*LowRank.*Full.*leave it out"),
        ({"fold": 3, "subspace": None}, "fold is for low-rank steps.*Full"),
        ({"fold": 3, "restore": "subtract"}, "leave fold out"),
    ],
)
def test_what_cannot_be_held_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(zb.ZeroBlockError, match=message):
        zb.ZeroOrder(Tiny(), 0.1, **{"subspace": zb.LowRank(2), "interval": 6, **options})
