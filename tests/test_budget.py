"""Steps without a learning rate: in units of the weights, and of the coefficients' own size."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroblock as zb
from test_parts import Submitted
from test_parts import run as taken
from toy import Tiny, same, snapshot
from zeroblock.budget import DISPLACEMENT, Budget
from zeroblock.errors import ZeroBlockError, ZeroBlockWarning
from zeroblock.journal import Header
from zeroblock.method import METHODS
from zeroblock.ops.weigh import LIMIT
from zeroblock.quantise import Scales
from zeroblock.size import typical_size

STEPS = 14
OPTIONS: dict[str, dict[str, Any]] = {
    "mezo_bcd_adam": {"interval": 3},
    "lozo": {"interval": 4, "fold": 2, "probes": 3},
    "lozo_m": {"interval": 4},
}


EACH = [(method, (torch.float32, torch.bfloat16)[i % 2]) for i, method in enumerate(METHODS) if method != "zo_muon"]
"""ZO-Muon's steps have a size of their own."""


@pytest.mark.parametrize(("method", "dtype"), [*EACH, ("mezo_bcd", torch.bfloat16)])
def test_every_method_without_lr_runs_submits_replays_and_resumes(method: str, dtype: torch.dtype, late: type) -> None:
    """Bit for bit the same: on the host, with numbers that stay on the device, from the records, from a state."""
    build = functools.partial(METHODS[method], seed=3, **OPTIONS.get(method, {}))
    model = Tiny(dtype=dtype)
    optimizer = build(model)
    assert optimizer.subspace.relative
    records = taken(optimizer, STEPS)
    assert method == "adalezo" or all(record.lr == optimizer.lr for record in records)  # whose schedule weighs steps
    weights = snapshot(model)
    assert not same(weights, snapshot(Tiny(dtype=dtype)))

    submitted = build(Tiny(dtype=dtype))
    Submitted.steps = 0
    assert taken(submitted, STEPS, Submitted) == records
    assert Submitted.steps == (STEPS if submitted.plan().capturable else 0)
    assert same(snapshot(submitted.model), weights)

    replayed = Header.of(build(Tiny(dtype=dtype))).rebuild(Tiny(dtype=dtype))
    zb.replay(replayed, records)
    assert same(snapshot(replayed.model), weights)

    half = build(Tiny(dtype=dtype))
    taken(half, STEPS // 2)
    resumed = build(Tiny(dtype=dtype))
    resumed.model.load_state_dict(half.model.state_dict())
    resumed.load_state_dict(half.state_dict())
    assert taken(resumed, STEPS) == records[STEPS // 2 :]
    assert same(snapshot(resumed.model), weights)


def test_neither_the_loss_nor_the_weights_have_a_unit() -> None:
    """Powers of two are exact, so the same steps come out to the bit."""

    class Unit(nn.Module):
        def __init__(self, unit: float) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(0)
            self.weight = nn.Parameter(torch.randn(4, 8, generator=generator) * unit)
            self.unit = unit

        def loss(self) -> torch.Tensor:
            return (self.weight / self.unit).double().square().sum().sqrt()

    results = []
    for unit, factor in ((1.0, 1.0), (2.0**6, 1.0), (1.0, 2.0**10)):
        model = Unit(unit)
        optimizer = zb.mezo(model)
        for _ in range(8):
            optimizer.step(lambda model=model, factor=factor: factor * model.loss())
        results.append(model.weight.detach() / unit)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], Unit(1.0).weight)


def test_a_step_moves_every_tensor_by_its_share() -> None:
    """A bias of 77, a matrix of 0.01, one that begins at zero, a number and nothing at all."""
    model = nn.ParameterDict(
        {
            "bias": torch.full((64,), 77.0),
            "matrix": torch.randn(32, 64) * 0.01,
            "zero": torch.zeros(64, 16),
            "scalar": torch.tensor(3.0),
            "none": torch.empty(0, 4),
        }
    )
    assert typical_size(model["bias"]) == pytest.approx(77, rel=2**-8)
    assert typical_size(model["zero"]) == 0.25 / 4
    assert typical_size(torch.tensor([math.inf, 1.0])) == pytest.approx(0.25 / math.sqrt(2), rel=2**-8)
    before = snapshot(model)
    optimizer = zb.zo_sign(model, steps=4)
    optimizer.step(lambda: sum(p.double().sum() for p in model.values()))
    for name in ("bias", "matrix", "zero", "scalar"):
        moved = (model[name].detach() - before[name]).double().square().mean().sqrt()
        assert float(moved) == pytest.approx(optimizer.lr * typical_size(before[name]), rel=1e-3)


def test_a_few_large_elements_do_not_make_a_vector_large() -> None:
    """Norms of Gemma have elements of 500 beside a median of 27; a share of their root mean square would be ruinous."""
    norm = torch.linspace(1.0, 2.0, 100)
    norm[::20] = -500.0
    model = nn.ParameterDict({"norm": norm.clone(), "matrix": norm.reshape(10, 10).clone()})
    assert typical_size(norm, 0.1) == float(norm.abs().sort().values[9].mul(128).round() / 128)  # of eight bits
    assert typical_size(norm) > 100
    optimizer = zb.zo_sign(model, steps=4)
    optimizer.step(lambda: sum(p.double().sum() for p in model.values()))
    moved = {name: float((p.detach() - norm.reshape(p.shape)).abs().mean()) for name, p in model.items()}
    assert moved["norm"] == pytest.approx(optimizer.lr * typical_size(norm, 0.1), rel=1e-3)
    assert moved["matrix"] == pytest.approx(optimizer.lr * typical_size(norm.reshape(10, 10)), rel=1e-3)
    assert typical_size(torch.cat([torch.zeros(8), torch.ones(56)]), 0.1) == 0.25 / 8  # the floor
    with pytest.raises(ZeroBlockError, match="quantile"):
        zb.Relative(quantile=0.0)


def test_a_journal_that_knows_no_quantile_is_rebuilt_as_it_was() -> None:
    """Until 2026-11-16 the size of a vector was its root mean square, scales had a floor, and no header said so."""
    scales = Scales(torch.full((4, 16), 2.0**-10), requires_grad=False)
    assert zb.Relative().initial(scales) == (0.25 / 4, None)
    assert zb.Relative(quantile=0.1).initial(scales) == (2.0**-10, None)
    model = Tiny()
    header = Header.of(zb.mezo_bcd(model, subspace=zb.Relative()))
    assert header.method["subspace"] == {"name": "Relative", "subspace": {"name": "Full"}}
    assert header.parts["subspace"] == "Relative(subspace=Full())"
    said = {**header.method["subspace"], "quantile": None}  # as headers of 2026-11-17 may have it
    for one in (header, dataclasses.replace(header, method={**header.method, "subspace": said})):
        assert one.rebuild(model).subspace == zb.Relative(quantile=None)
    assert Header.of(zb.mezo_bcd(model)).rebuild(model).subspace == zb.Relative(quantile=0.1)


@pytest.mark.parametrize(("interval", "boost"), [(1, 1.0), (2, 1.0), (2, 3.0), (5, 1.0), (20, 1.0)])
def test_steps_that_repeat_an_anchor_keep_the_budget(interval: int, boost: float) -> None:
    """Without the correction a turn of 20 steps leads eight times as far."""
    draws = torch.Generator().manual_seed(1)
    model = nn.ParameterDict({name: torch.randn(64, 64, generator=draws) for name in "ab"})
    before, steps = snapshot(model), 200

    def batch(rows: int) -> Callable[[], torch.Tensor]:
        x = torch.randn(rows, 64, generator=draws)
        return lambda: (torch.tanh(x @ model["a"]) @ model["b"]).square().mean().log()

    optimizer = zb.mezo_svrg(model, steps=steps, interval=interval, boost=boost)
    for _ in range(steps):
        optimizer.step(batch(8), anchor=batch(64))
    moved = [(model[n].detach() - before[n]).double().square().mean().sqrt() / typical_size(before[n]) for n in "ab"]
    assert 0.4 * DISPLACEMENT < float(max(moved)) < 1.3 * DISPLACEMENT


def test_the_sizes_are_the_same_on_the_host_and_on_the_device() -> None:
    """Over freaks, zeros and steps that are not taken."""
    rule, draws = zb.Normalized(), random.Random(0)
    host = [[0.0, 0.0] for _ in range(4)]
    device = torch.zeros(4, 2, dtype=torch.float64)
    for step in range(200):
        probes, block = (1, 2, 3, 8)[step % 4], draws.randrange(3)
        size = (0.0 if step < 5 else 1.0) * (1e4 if step % 50 == 49 else 1.0)
        coeffs = torch.tensor([size * draws.gauss(0, 1) for _ in range(probes)], dtype=torch.float32).double()
        before = device.clone()
        if step % 7 == 6:
            coeffs[0] = math.nan
            rule.weigh_on_device(coeffs, torch.tensor([False]), device, block)
            assert torch.equal(device, before)
            continue
        on_device = rule.weigh_on_device(coeffs, torch.tensor([True]), device, block)
        on_host = rule.weigh(coeffs.tolist(), host, block)
        assert on_device.tolist() == on_host
        assert device.tolist() == host
        assert max(map(abs, on_host)) < 2 * LIMIT


def test_a_freak_is_a_step_like_others_and_is_forgotten() -> None:
    rule, table = zb.Normalized(), [[0.0, 0.0], [0.0, 0.0]]
    for c in (2.0, -2.0) * 20:
        (usual,) = rule.weigh([c], table, 0)
    assert abs(usual) == pytest.approx(math.sqrt(2 / math.pi))
    (freak,) = rule.weigh([187.0], table, 0)
    assert freak < LIMIT
    (after,) = rule.weigh([2.0], table, 0)
    assert after > 0.65


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    model = Tiny()
    optimizer = zb.mezo_bcd(model)
    taken(optimizer, 5)
    before, table = snapshot(model), optimizer.state_dict()["table"]
    with pytest.warns(zb.ZeroBlockWarning, match="not finite"):
        optimizer.step(lambda: math.nan)
    assert same(snapshot(model), before)
    assert optimizer.state_dict()["table"] == table


@pytest.mark.parametrize(("blocks", "probes"), [(1, 1), (32, 4)])
def test_a_run_spends_its_budget(blocks: int, probes: int) -> None:
    budget, steps = Budget(blocks, probes), 3200
    for lr_schedule, share in {"constant": lambda p: 1.0, "linear": lambda p: 1 - p}.items():
        first = budget.rate(steps, lr_schedule)
        spent = sum((first * share(t / steps)) ** 2 for t in range(steps)) / blocks / probes
        assert math.sqrt(spent) == pytest.approx(DISPLACEMENT, rel=0.02)
    spent = 0.0
    for t in range(steps):  # what is left, step by step, is the linear decay
        lr = budget.rest(spent, steps - t)
        assert t > 3000 or lr == pytest.approx(budget.rate(steps, "linear") * (1 - t / steps), rel=0.05)
        spent += lr * lr
    assert budget.rate(1) == DISPLACEMENT * math.sqrt(probes)


def test_steps_make_the_learning_rate_fall_by_itself() -> None:
    optimizer = zb.mezo_bcd(Tiny(), steps=4)
    first = optimizer.lr
    assert first == Budget(5).rate(4, "linear")
    with pytest.warns(
        ZeroBlockWarning, match=r"the 4 steps that the optimizer was built for.*further steps move nothing"
    ):
        records = taken(optimizer, 6)
    assert [record.lr for record in records] == [first * share for share in (1, 0.75, 0.5, 0.25, 0, 0)]
    again = zb.mezo_bcd(Tiny(), steps=4)
    zb.replay(again, records[:3])
    with pytest.warns(ZeroBlockWarning, match="move nothing"):
        assert taken(again, 6) == records[3:]
    assert zb.ZeroOrder(Tiny(), lr=0.5, steps=2).lr == 0.5


@pytest.mark.parametrize(("short", "long"), [(4, 40), (4, None), (None, 40)])
def test_a_state_of_a_run_of_another_length_is_said_and_gets_the_rate_of_this_one(
    short: int | None, long: int | None
) -> None:
    model = Tiny()
    optimizer = zb.mezo_bcd(model, steps=short)
    taken(optimizer, 4)
    state = optimizer.state_dict()
    longer = zb.mezo_bcd(model, steps=long)
    expected = longer.lr * (1 if long is None else 1 - 4 / long)
    with pytest.warns(ZeroBlockWarning, match=r"saved with (steps=4|no steps=).*has (steps=40|no steps=)"):
        longer.load_state_dict(state)
    assert taken(longer, 5)[0].lr == expected
    same_length = zb.mezo_bcd(model, steps=short)
    same_length.load_state_dict(state)
    old = zb.mezo_bcd(model, steps=long)  # a state from before lengths were saved goes on as it did
    old.load_state_dict({name: value for name, value in state.items() if name != "length"})
    given = zb.mezo_bcd(model, lr=0.5, steps=2)
    saved = zb.mezo_bcd(model, lr=0.25, steps=4).state_dict()
    given.load_state_dict(saved)  # as torch does it: the rate of the state
    assert given.lr == 0.25


def test_points_that_bf16_does_not_resolve_are_warned_about() -> None:
    """The default eps of an estimator is the papers'; without lr it would be a thousandth of the weights."""
    near, right = zb.OneSided(probes=2), zb.OneSided(eps=0.04, probes=2)
    with pytest.warns(
        ZeroBlockWarning, match=r"OneSided\(eps=0.001\) measures at 0.1% of their size.*OneSided\(eps=0.04\)"
    ):
        zb.mezo_bcd(Tiny().bfloat16(), estimator=near)
    for model, options in [
        (Tiny(), {"estimator": near}),
        (Tiny().bfloat16(), {"estimator": right}),
        (Tiny().bfloat16(), {"estimator": near, "lr": 1e-3}),
    ]:
        zb.mezo_bcd(model, **options)
