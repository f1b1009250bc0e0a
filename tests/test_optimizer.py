"""ZeroOrder as a torch optimizer: modes, schedulers, bad input, odd objectives."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import os
import signal
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zeroblock as zb
from toy import Tiny, distance, next_token, same, snapshot
from zeroblock.basis import Elementwise
from zeroblock.errors import ZeroBlockError, ZeroBlockWarning
from zeroblock.state import State
from zeroblock.step import Mean, Objective


def test_the_closure_runs_in_evaluation_mode_without_gradient() -> None:
    model = Tiny()
    model.dropout = nn.Dropout(0.5)
    model.train()
    model.layers[1].eval()
    modes = {m: m.training for m in model.modules()}

    def loss() -> torch.Tensor:
        assert not torch.is_grad_enabled()
        assert not any(m.training for m in model.modules())
        return next_token(model)()

    value = zb.mezo_bcd(model, 1e-3).step(loss)
    assert value.shape == ()
    assert not value.requires_grad
    assert {m: m.training for m in model.modules()} == modes
    assert torch.is_grad_enabled()


def test_learning_rate_schedulers() -> None:
    model = Tiny()
    optimizer = zb.mezo_bcd(model, 1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            optimizer.step(lambda: 0.0)
            rates.append(optimizer.record.lr)
            scheduler.step()
    assert rates == pytest.approx([1.0, 1.0, 0.1, 0.1, 0.01])
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "convert",
    [
        float,
        lambda x: np.float32(float(x)),
        lambda x: x.half(),
        lambda x: x.expand(3, 2).bfloat16(),
        lambda x: x.double(),
    ],
    ids=["float", "numpy", "fp16 tensor", "per-example losses", "fp64 tensor"],
)
def test_any_number_is_a_loss(convert) -> None:
    model = Tiny()
    optimizer = zb.mezo(model, 0.0)
    loss = optimizer.step(lambda: convert(next_token(model)()))
    assert float(loss) == pytest.approx(float(next_token(model)().detach()), rel=1e-2)


def test_logits_are_hardly_a_loss() -> None:
    model = Tiny()
    with pytest.warns(ZeroBlockWarning, match=r"a tensor of shape \(2, 5, 40\), and the step takes its mean"):
        zb.mezo(model, 0.0).step(lambda: next_token(model)().expand(2, 5, 40))


def test_objectives_without_a_gradient() -> None:
    """Counts in numpy: nothing to differentiate, yet it improves."""
    model = Tiny(dtype=torch.float64)
    tokens = torch.arange(7)

    def wrong() -> float:
        scores = model(tokens).numpy()
        margin = scores[np.arange(7), (np.arange(7) + 1) % 7][:, None] - scores
        return float(np.clip(1.0 - margin, 0, None).sum())

    with torch.no_grad():
        before = wrong()
    optimizer = zb.mezo_bcd_adam(model, 1e-2, interval=10)
    for _ in range(300):
        optimizer.step(wrong)
    with torch.no_grad():
        assert wrong() < 0.7 * before


def test_losses_are_averaged_in_fp32() -> None:
    """2,048 equal fp16 losses: their fp16 sum would overflow."""
    optimizer = zb.mezo(Tiny(), 0.0, restore="subtract")
    losses = torch.full((2048,), 40.0, dtype=torch.float16)
    assert float(optimizer.step(lambda: losses)) == 40.0


def test_any_module() -> None:
    """Convolutions, recurrence, batch norm, attention with its fused path: all weights are seen perturbed."""

    class Zoo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(3, 8, 3, padding=1)
            self.norm = nn.BatchNorm1d(8)
            self.recurrent = nn.GRU(8, 8, batch_first=True)
            self.attend = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(self.conv(x)).transpose(1, 2)
            return self.scale * self.attend(self.recurrent(h)[0])

    torch.manual_seed(0)
    model = Zoo()
    x, weights = torch.randn(2, 3, 5), torch.randn(2, 5, 8)
    results = []
    for name in dict(model.named_parameters()):
        for restore in ("copy", "subtract"):
            for n, p in model.named_parameters():
                p.requires_grad_(n == name)
            optimizer = zb.mezo(model, 0.0, eps=1e-2, restore=restore)
            optimizer.step(lambda: (model(x) * weights).sum())
            results.append((name, optimizer.record.losses))
    for (name, copied), (_, subtracted) in zip(results[::2], results[1::2], strict=True):
        assert copied == pytest.approx(subtracted, rel=1e-5), name
        assert copied[0] != copied[1], name


def test_autocast_does_not_hide_the_perturbation() -> None:
    """Autocast keeps 16-bit weights while its context is open; a step inside must not see the other side's."""
    model = Tiny()

    def inside() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return next_token(model)()

    for build in (zb.mezo_bcd, zb.mezo):
        fresh, held = build(model, 0.0, eps=0.1), build(model, 0.0, eps=0.1)
        for _ in range(5):
            fresh.step(inside)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                held.step(next_token(model))
            assert held.record.losses == fresh.record.losses


def test_weight_decay_spares_vectors_and_other_blocks() -> None:
    model = Tiny(dtype=torch.float64)
    start = snapshot(model)
    optimizer = zb.mezo_bcd(model, 0.1, weight_decay=0.5)
    optimizer.step(lambda: 1.0)  # a flat objective: nothing but decay
    active = optimizer.blocks[optimizer.record.block].params
    for n, p in model.named_parameters():
        factor = 0.95 if n in active and p.dim() > 1 else 1.0
        torch.testing.assert_close(p.detach(), start[n] * factor, rtol=1e-12, atol=0)
    every = Tiny(dtype=torch.float64)
    zb.mezo(every, 0.1, weight_decay=0.5, decays=lambda name, param: True).step(lambda: 1.0)
    torch.testing.assert_close(every.norm.weight.detach(), start["norm.weight"] * 0.95)


@pytest.mark.parametrize("name", [name for name, build in zb.METHODS.items() if len(build(Tiny()).plan().points) == 2])
def test_a_clipped_step_is_the_step_of_smaller_coefficients(name: str) -> None:
    """And the record keeps what was measured; within the limit nothing changes."""
    ends, heard = [], []
    for slope, clip in ((100.0, 10.0), (-10.0, None), (-100.0, 10.0), (-10.0, 10.0)):
        model = Tiny()
        optimizer = zb.METHODS[name](model, 1e-2, eps=0.5, clip=clip)
        sides = itertools.cycle((slope / 2, -slope / 2))
        optimizer.step(lambda sides=sides: next(sides))
        assert optimizer.record.coeffs == (slope,)
        ends.append(snapshot(model))
        heard.append(list(optimizer.scores))
    assert heard[1] == heard[2] == heard[3]
    assert same(ends[1], ends[2])
    assert same(ends[1], ends[3])
    assert not same(ends[0], ends[1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_loss_is_skipped_counted_and_warned_about_once(bad: float) -> None:
    model = Tiny()
    optimizer = zb.mezo_bcd(model, 1.0, schedule=zb.Adaptive())
    before, scores = snapshot(model), list(optimizer.scores)
    with pytest.warns(ZeroBlockWarning, match=r"step 0 is not finite; the step is skipped .* lower lr"):
        optimizer.step(lambda: bad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(lambda: bad)
    assert same(snapshot(model), before)
    assert (optimizer.skipped, optimizer.steps, optimizer.scores) == (2, 2, scores)
    assert math.isnan(optimizer.record.coeffs[0])
    optimizer.step(next_token(model))
    assert optimizer.skipped == 2
    assert not same(snapshot(model), before)


def test_a_run_of_bad_losses_ends_with_advice() -> None:
    optimizer = zb.mezo(Tiny(), 1.0, patience=3)
    with pytest.warns(ZeroBlockWarning):
        for loss in (math.nan, math.nan, 1.0, math.nan, math.nan):
            optimizer.step(lambda loss=loss: loss)
    with pytest.raises(ZeroBlockError, match=r"not finite for 3 steps in a row, the last being step 5: lower lr"):
        optimizer.step(lambda: math.nan)
    assert optimizer.skipped == 5


def test_ctrl_c_during_the_update_waits_for_its_end() -> None:
    """The step is whole: the weights are those of an undisturbed step, and the record says it was taken."""
    import dataclasses

    @dataclasses.dataclass(frozen=True)
    class Interrupting(zb.Momentum):
        def delta(self, g, state, t):
            os.kill(os.getpid(), signal.SIGINT)
            return super().delta(g, state, t)

    calm, disturbed = Tiny(), Tiny()
    zb.zo_momentum(calm, 1e-2).step(next_token(calm))
    optimizer = zb.ZeroOrder(disturbed, 1e-2, partition=zb.whole, rule=Interrupting())
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(next_token(disturbed))
    assert optimizer.steps == 1
    assert same(snapshot(disturbed), snapshot(calm))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_steps_work_outside_the_main_thread() -> None:
    model, here = Tiny(), Tiny()
    thread = threading.Thread(target=lambda: zb.mezo(model, 1e-2).step(next_token(model)))
    thread.start()
    thread.join()
    zb.mezo(here, 1e-2).step(next_token(here))
    assert same(snapshot(model), snapshot(here))


def test_subtraction_comes_back_after_an_exception_too() -> None:
    model = Tiny(dtype=torch.float64)
    before = snapshot(model)

    def fails() -> float:
        assert not same(snapshot(model), before)  # MeZO's way does write the weights
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        zb.mezo(model, 1e-3, restore="subtract").step(fails)
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[n], rtol=0, atol=1e-15)


def test_wrong_closures() -> None:
    model = Tiny()
    optimizer = zb.mezo(model, 1e-3)
    for closure, message in (
        (lambda: None, "returned None; return the loss"),
        (lambda: {"loss": 1}, "must return a number, got dict"),
        (None, "needs a closure"),
        ([], "needs a closure"),
        (torch.tensor(1.5), "or a list of them; got Tensor"),
        ("loss", "got str"),
        ([None], "got list"),
    ):
        with pytest.raises(ZeroBlockError, match=message):
            optimizer.step(closure)
    assert optimizer.steps == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be finite and not negative"),
        ({"lr": math.nan}, "lr must be finite"),
        ({"eps": 0.0}, "eps must be positive"),
        ({"probes": 0}, "probes must be at least 1"),
        ({"interval": 0}, "interval must be a whole number and at least 1"),
        ({"interval": 2.5}, "interval must be a whole number and at least 1, got 2.5"),
        ({"interval": torch.tensor(2.5)}, "interval must be a whole number"),
        ({"restore": "add"}, "restore must be 'copy' or 'subtract'"),
        ({"weight_decay": -0.1}, "weight_decay must be"),
        ({"clip": 0.0}, "clip must be finite and positive, or None, got 0"),
        ({"clip": math.nan}, "clip must be finite and positive"),
    ],
)
def test_wrong_values(options: dict[str, object], message: str) -> None:
    with pytest.raises(ZeroBlockError, match=message):
        zb.mezo(Tiny(), **options)


def test_another_group_is_refused() -> None:
    with pytest.raises(ZeroBlockError, match="unfreeze them before building it"):
        zb.mezo(Tiny(), 1e-3).add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_unusable_weights() -> None:
    with pytest.raises(ZeroBlockError, match="load the weights first"):
        zb.mezo(nn.Linear(2, 2, device="meta"), 1e-3)
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    with pytest.raises(ZeroBlockError, match=r"'weight' is torch.complex64; .*freeze the others"):
        zb.mezo(model, 1e-3)


def test_a_state_of_another_run_is_refused() -> None:
    saved = zb.mezo_bcd(Tiny(), 1e-3).state_dict()
    for other, message in (
        (zb.mezo_bcd(Tiny(), 1e-3, seed=1), "saved with seed 0, this optimizer has 1"),
        (zb.mezo_bcd(Tiny(depth=2), 1e-3), "saved with number of blocks 5"),
        (zb.mezo_bcd(Tiny(), 1e-3, schedule=zb.FlipFlop()), r"saved with schedule Shuffled\(\)"),
        (zb.mezo_bcd(Tiny(), 1e-3, eps=1e-2), "saved with estimator TwoSided"),
        (zb.mezo_bcd(Tiny(), 1e-3, clip=2), r"saved with clip None, this optimizer has 2\.0"),
    ):
        with pytest.raises(ZeroBlockError, match=message):
            other.load_state_dict(saved)
    older = {**saved, "parts": {**saved["parts"], "noise": "version 0"}}
    with pytest.raises(ZeroBlockError, match="saved with noise version 0, this optimizer has version 1"):
        zb.mezo_bcd(Tiny(), 1e-3).load_state_dict(older)
    with pytest.raises(ZeroBlockError, match="not one of ZeroOrder"):
        zb.mezo(Tiny(), 1e-3).load_state_dict({"state": {}, "param_groups": []})


def test_a_replay_of_another_run_is_refused() -> None:
    model = Tiny()
    optimizer = zb.mezo_bcd(model, 1e-3)
    records = []
    for _ in range(5):
        optimizer.step(next_token(model))
        records.append(optimizer.record)
    with pytest.raises(ZeroBlockError, match="another method, seed or order"):
        zb.replay(zb.mezo_bcd(Tiny(), 1e-3, seed=8), records)
    with pytest.raises(ZeroBlockError, match="start at step 2, the optimizer is at step 0"):
        zb.replay(zb.mezo_bcd(Tiny(), 1e-3), records[2:])
    with pytest.raises(ZeroBlockError, match="no record of step 1"):
        zb.replay(
            zb.mezo(Tiny(), 1e-3), [zb.Record(0, 0, (1.0,), 1e-3, (), 0.0), zb.Record(3, 0, (1.0,), 1e-3, (), 0.0)]
        )
    zb.replay(optimizer, [])
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_a_compiled_or_scripted_model_is_perturbed_as_a_whole() -> None:
    """Its reads are not visible one by one; a copy of the block is swapped in, with one warning."""
    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    scripted = torch.jit.trace(plain, x)
    want = zb.mezo(plain, 0.0)
    want.step(lambda: plain(x).square().mean())
    got = zb.mezo(scripted, 0.0)
    with pytest.warns(ZeroBlockWarning, match="compiled or scripted"):
        got.step(lambda: scripted(x).square().mean())
    assert got.record.losses == pytest.approx(want.record.losses, rel=1e-12)
    assert got.record.losses[0] != got.record.losses[1]


def test_the_parts_name_every_value() -> None:
    parts = zb.mezo_bcd_adam(Tiny(), 1e-3, partition=zb.linears, interval=7).parts
    assert parts["partition"] == "linears"
    assert parts["rule"] == "Adam(betas=(0.9, 0.999), eps=1e-08, reset=True)"
    assert parts["interval"] == "7"
    assert "schedule=Shuffled()" in repr(zb.mezo_bcd(Tiny()))
    assert (
        zb.ZeroOrder(Tiny(), 0.1, partition=[[n for n, _ in Tiny().named_parameters()]]).parts["partition"]
        == "explicit"
    )


def test_quadratic_in_fp64_converges_far() -> None:
    model = Tiny(depth=1, dtype=torch.float64)
    loss = distance(model)
    before = float(loss().detach())
    optimizer = zb.mezo(model, 2e-2, probes=8)
    for _ in range(170):
        optimizer.step(loss)
    assert float(loss().detach()) < 1e-2 * before


class Submitting(Objective):
    """Stands for an objective of a GPU: most steps are submitted and end later, every fourth is not."""

    submits = True

    def __init__(self, objective) -> None:
        self.objective = objective

    def __call__(self):
        return self.objective()

    def submit(self, points):
        return None if points[0].direction.key.step % 4 == 3 else self.measure(points)


@pytest.mark.parametrize("name", ["mezo_bcd", "mezo_bcd_adam", "mezo_bcd_adaptive"])
@pytest.mark.parametrize("interval", [50, 3])
def test_captured_and_other_steps_may_take_turns(name: str, interval: int, late: type) -> None:
    """Records come in order, Adam counts the steps of both kinds, and a state may be taken while steps are pending."""
    ends = []
    for wrap in (Submitting, lambda objective: objective):
        model = Tiny()
        optimizer, heard = zb.METHODS[name](model, 1e-2, interval=interval, clip=0.3), []
        optimizer.listener = heard.append
        for step in range(16):
            optimizer.step(wrap(next_token(model)))
            if step == 7:
                state = optimizer.state_dict()
                optimizer = zb.METHODS[name](model, 1e-2, interval=interval, clip=0.3)
                optimizer.load_state_dict(state)
                optimizer.listener = heard.append
        optimizer.flush()
        assert [record.step for record in heard] == list(range(16))
        assert {abs(record.coeffs[0]) > 0.3 for record in heard} == {True, False}
        ends.append(snapshot(model))
    assert same(*ends)


class Hopeless(Submitting):
    def submit(self, points) -> torch.Tensor:
        return torch.full((2,), math.nan, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore::zeroblock.ZeroBlockWarning")
def test_giving_up_leaves_a_state_to_save(late: type) -> None:
    model = Tiny()
    optimizer = zb.mezo_bcd(model, 1e-2, schedule=zb.Ascending(), patience=3)
    objective = Hopeless(next_token(model))
    with pytest.raises(ZeroBlockError, match="not finite for"):
        list(map(optimizer.step, [objective] * 200))
    assert optimizer.block == optimizer.steps % len(optimizer.blocks)
    assert optimizer.state_dict()["skipped"] == optimizer.steps


class Now(Submitting):
    """Submits every step, some of them without a loss."""

    bad: tuple[int, ...] = ()

    def submit(self, points) -> torch.Tensor:
        bad = points[0].direction.key.step in self.bad
        return torch.tensor([math.nan if bad else 1.0, 0.998], dtype=torch.float64)


def test_ctrl_c_while_waiting_loses_no_record(late: type) -> None:
    """It comes when the wait is over, before anybody heard of the step."""
    model, heard = Tiny(), []
    optimizer = zb.mezo_bcd(model, 1e-2)
    optimizer.listener = heard.append
    for _ in range(5):
        optimizer.step(Now(next_token(model)))
    assert len(heard) < 4
    late.interrupts = 2
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            optimizer.flush()
    optimizer.flush()
    assert [record.step for record in heard] == list(range(5))


@pytest.mark.filterwarnings("ignore::zeroblock.ZeroBlockWarning")
@pytest.mark.parametrize("bad", [(1, 2, 3), (4, 5, 6, 7)])
def test_a_good_step_does_not_hide_the_bad_ones_before_it(
    bad: tuple[int, ...], late: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, heard = Tiny(), []
    optimizer = zb.mezo_bcd(model, 1e-2, patience=3)
    optimizer.listener = heard.append
    objective = Now(next_token(model))
    objective.bad = (*bad, 9)
    monkeypatch.setattr("zeroblock.run.queue.MAX_LAG_MS", 1e9)  # all are under way at a time
    for _ in range(11):
        optimizer.step(objective)
    assert not heard
    with pytest.raises(
        ZeroBlockError, match=f"not finite for {len(bad)} steps in a row, the last being step {bad[-1]}"
    ):
        optimizer.flush()
    assert [record.step for record in heard] == list(range(11))


@pytest.mark.parametrize(("pace", "most"), [(1.0, 64), (18.0, 55), (400.0, 2), (9000.0, 2)])
def test_steps_under_way_are_a_second_of_work(pace: float, most: int, late: type) -> None:
    """So a stop does not wait for minutes, and a kill loses little; never so few that the device waits."""
    late.pace = pace
    model, heard, behind = Tiny(), [], []
    optimizer = zb.mezo_bcd(model, 1e-2)
    optimizer.listener = heard.append
    for _ in range(100):
        optimizer.step(Now(next_token(model)))
        behind.append(optimizer.steps - len(heard))
    assert max(behind[:3]) <= 2  # it is not known yet
    assert max(behind) == behind[-1] == most


def test_a_state_is_not_of_the_middle_of_a_step() -> None:
    """The block of the next turn is not chosen yet when a listener hears of the last step of this one."""
    model = Tiny()
    optimizer = zb.mezo_bcd(model, 1e-2, interval=2)
    optimizer.listener = lambda record: optimizer.state_dict()
    optimizer.step(next_token(model))
    with pytest.raises(ZeroBlockError, match="outside the listener"):
        optimizer.step(next_token(model))
    assert optimizer.state_dict()["steps"] == 2


def test_a_schedule_need_not_say_that_it_learns(late: type) -> None:
    class Mine:
        def pick(self, turn: int, n: int, seed: int, scores: list[float]) -> int:
            return turn % n

        def observe(self, scores: list[float], block: int, coeffs: tuple[float, ...]) -> None:
            scores[block] += 1

    model = Tiny()
    optimizer = zb.ZeroOrder(model, 1e-2, schedule=Mine())
    for _ in range(3):
        optimizer.step(Now(next_token(model)))
    assert sum(optimizer.scores) == 3  # it may, so it hears of every step before the next


def test_a_listener_that_raises_changes_no_step() -> None:
    model, visited = Tiny(), []
    optimizer = zb.mezo_bcd(model, 1e-2, schedule=zb.Ascending())

    def listen(record: zb.Record) -> None:
        visited.append(record.block)
        if record.step == 1:
            raise RuntimeError("full")

    optimizer.listener = listen
    while optimizer.steps < 5:
        with contextlib.suppress(RuntimeError):
            optimizer.step(next_token(model))
    assert visited == [0, 1, 2, 3, 4]


def test_ctrl_c_while_weights_are_moved_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tiny(dtype=torch.float64)
    before, moved = snapshot(model), []
    optimizer, add = zb.mezo(model, 1e-2, restore="subtract"), Elementwise.add_

    def interrupted(self: Elementwise, *args: Any) -> None:
        add(self, *args)
        moved.append(1)
        if len(moved) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Elementwise, "add_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(next_token(model))
    for name, value in snapshot(model).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=1e-12)


def test_a_state_of_other_blocks_is_refused() -> None:
    model = Tiny()
    names = [name for name, _ in model.named_parameters()]
    one = zb.mezo_bcd_adam(model, 1e-2, partition=[names[:5], names[5:]])
    other = zb.mezo_bcd_adam(model, 1e-2, partition=[names[5:], names[:5]])
    one.step(next_token(model))
    with pytest.raises(ZeroBlockError, match="has other parameters"):
        other.load_state_dict(one.state_dict())


def test_a_state_may_be_loaded_where_it_was_taken() -> None:
    model = Tiny()
    optimizer = zb.mezo_bcd_adam(model, 1e-2)
    for _ in range(3):
        optimizer.step(next_token(model))
    state = optimizer.state_dict()
    moments = {name: one["m"].clone() for name, one in state["state"].items()}
    optimizer.load_state_dict(state)
    assert moments
    for name, moment in moments.items():
        assert moment.abs().sum() > 0
        assert torch.equal(optimizer.state_dict()["state"][name]["m"], moment)


def test_weights_that_cannot_be_shown_are_not_measured_in_silence() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.linspace(-1, 1, 4)
    traced = torch.jit.trace(model, x)
    before = snapshot(model)
    with pytest.raises(zb.ZeroBlockError, match="restore='subtract'"):
        zb.mezo(model).step(lambda: traced(x).square().sum())
    assert same(before, snapshot(model))
    optimizer = zb.mezo(model, restore="subtract")
    optimizer.step(lambda: traced(x).square().sum())
    assert optimizer.record.coeffs[0] != 0


def test_an_objective_that_compiles_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.linspace(-1, 1, 4)
    compiled = torch.compile(model, backend="eager")
    records = []
    for run in (compiled, model):
        optimizer = zb.mezo(model, lr=0.0)
        optimizer.step(lambda run=run: run(x).square().sum())
        records.append(optimizer.record)
    assert records[0].losses == records[1].losses
    assert records[0].losses[0] != records[0].losses[1]


def test_subtraction_is_refused_where_it_cannot_restore() -> None:
    for build in (
        functools.partial(zb.sparse_mezo, restore="subtract"),
        functools.partial(zb.sparse_mezo, as_published=True),
        functools.partial(zb.lozo, as_published=True, restore="subtract"),
    ):
        with pytest.raises(zb.ZeroBlockError, match="cannot be restored by subtraction"):
            build(Tiny())


def test_states_of_the_two_ways_to_restore_are_told_apart() -> None:
    state = zb.mezo(Tiny(), restore="subtract").state_dict()
    with pytest.raises(zb.ZeroBlockError, match="restore subtract"):
        zb.mezo(Tiny()).load_state_dict(state)


def test_a_copy_is_refused_with_what_to_do() -> None:
    with pytest.raises(zb.ZeroBlockError, match="state_dict"):
        copy.deepcopy(zb.mezo(Tiny()))


def test_a_parameter_without_elements() -> None:
    model = Tiny()
    model.none = nn.Parameter(torch.empty(0))
    for build in zb.METHODS.values():
        before = snapshot(model)
        build(model, lr=1e-3).step(next_token(model))
        assert not same(before, snapshot(model))


def test_weight_decay_stays_what_it_was() -> None:
    """Records do not tell of it, so a replay could not follow."""
    model = Tiny()
    optimizer = zb.mezo_bcd(model, 1e-2, weight_decay=0.1)
    optimizer.step(next_token(model))
    state = optimizer.state_dict()
    optimizer.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(zb.ZeroBlockError, match=r"weight_decay was 0\.1 and is 0\.5 now"):
        optimizer.step(next_token(model))
    other = zb.mezo_bcd(model, 1e-2)
    other.load_state_dict(state)
    other.step(next_token(model))
    assert other.param_groups[0]["weight_decay"] == 0.1


def test_a_part_of_ones_own_is_told_in_words() -> None:
    class Mine:
        learns = False

        def pick(self, turn: int, n: int, seed: int, scores: object) -> int:
            return turn % n

        def observe(self, scores: object, block: int, coeffs: object) -> None:
            pass

    one, other = (zb.mezo_bcd(Tiny(), 1e-2, schedule=Mine()) for _ in range(2))
    assert one.parts["schedule"].endswith("Mine")
    other.load_state_dict(one.state_dict())


def test_a_turn_that_cannot_be_entered_is_entered_before_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step before it was taken; its record and the moved block agree, before and after the error."""
    model, moved = Tiny(), []
    optimizer = zb.mezo_bcd(model, 1e-2, schedule=zb.Ascending())
    members = optimizer.weights.members
    monkeypatch.setattr(optimizer.weights, "members", lambda *a: (_ for _ in ()).throw(MemoryError("no room")))
    with pytest.raises(MemoryError):
        optimizer.step(next_token(model))
    monkeypatch.setattr(optimizer.weights, "members", members)
    for _ in range(3):
        before = snapshot(model)
        optimizer.step(next_token(model))
        changed = {name for name, weight in snapshot(model).items() if not torch.equal(weight, before[name])}
        moved.append(changed <= set(optimizer.blocks[optimizer.record.block].params))
    assert optimizer.record.step == optimizer.record.block == 3
    assert all(moved)


def test_attributes_stay_live() -> None:
    """As in 0.1: what is set between two steps counts from the next one on."""
    optimizer = zb.mezo_bcd(Tiny(), 1e-2)
    optimizer.estimator = zb.OneSided(1e-2)
    assert "OneSided" in optimizer.state_dict()["parts"]["estimator"]
    optimizer.schedule = zb.Descending()
    optimizer.patience = 5
    optimizer.step(next_token(optimizer.model))
    assert optimizer.block == len(optimizer.blocks) - 2
    assert optimizer.patience == 5
    with pytest.raises(ZeroBlockError, match="patience must be a whole number"):
        optimizer.patience = 0


def test_only_means_over_one_unit_are_weighted() -> None:
    class Counted(Objective):
        def __init__(self, value: float, weight: tuple[str, float] | None) -> None:
            self.value, self.own = value, weight

        def __call__(self) -> float:
            return self.value

        @property
        def weight(self) -> tuple[str, float] | None:
            return self.own

    one, three = Counted(1.0, ("tokens", 1.0)), Counted(5.0, ("tokens", 3.0))
    assert float(Mean([one, three])()) == 4.0
    assert float(Mean([Mean([one, three]), Counted(8.0, ("tokens", 4.0))])()) == 6.0
    assert float(Mean([one, Counted(5.0, ("examples", 3.0))])()) == 3.0
    assert float(Mean([one, lambda: 5.0])()) == 3.0


@pytest.mark.parametrize("rule", [zb.Momentum(), zb.Adam(reset=False)], ids=str)
def test_a_state_that_cannot_be_made_moves_nothing(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tiny()
    optimizer, before, made = zb.ZeroOrder(model, 1e-2, partition=zb.whole, rule=rule), snapshot(model), []
    zeros = State._zeros

    def full(self: State, *arguments: Any) -> torch.Tensor:
        made.append(1)
        if len(made) == 5:
            raise torch.OutOfMemoryError("no room")
        return zeros(self, *arguments)

    monkeypatch.setattr(State, "_zeros", full)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step(next_token(model))
    assert same(snapshot(model), before)
    assert optimizer.steps == 0


def test_ctrl_c_at_random_times_leaves_the_weights_and_the_handler() -> None:
    """A timer interrupts steps at hundreds of places; weights change only with a step that is counted."""
    model = Tiny()
    handler = signal.getsignal(signal.SIGINT)
    optimizers = [zb.mezo_bcd(model, 1e-2), zb.mezo(model, 1e-2), zb.mezo_bcd(model, 1e-2, restore="subtract")]
    model.train()
    signal.signal(signal.SIGALRM, lambda number, frame: os.kill(os.getpid(), signal.SIGINT))
    interrupts = 0
    for round in range(240):
        optimizer = optimizers[round % 3]
        before, steps = snapshot(model), optimizer.steps
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-5 * (1 + 7 * round % 97))
            optimizer.step(next_token(model))
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupts += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert signal.getsignal(signal.SIGINT) is handler
        assert all(module.training for module in model.modules())
        if optimizer.steps == steps:
            for name, weight in snapshot(model).items():
                torch.testing.assert_close(weight, before[name], rtol=0, atol=1e-6)
    assert interrupts > 20


def test_a_captured_update_is_of_one_clip() -> None:
    """``clip`` may be assigned between steps, so graphs that were captured with another one must not be used."""
    optimizer = zb.mezo_bcd(Tiny(), lr=1.0, clip=1.0)
    before = optimizer.plan().memory
    optimizer.clip = 2.0
    assert optimizer.plan().memory != before


@pytest.mark.parametrize("lr", [0.1, None])
@pytest.mark.parametrize("probes", [1, 2, 3])
def test_an_update_on_the_device_is_that_of_the_host(lr: float | None, probes: int) -> None:
    """It needs no GPU to be asked.  One coefficient that is not finite, or a trial run, and nothing moves at all."""
    coeffs = torch.tensor([0.5, -0.25, 0.1][:probes], dtype=torch.float64)
    rate, live, trial = torch.tensor([0.1], dtype=torch.float64), torch.ones(1).long(), torch.zeros(1).long()
    model, twin = Tiny(), Tiny()
    twin.load_state_dict(model.state_dict())
    optimizers = [zb.mezo_bcd(one, lr, probes=probes) for one in (model, twin)]
    before = snapshot(model)
    for bad in (math.nan, math.inf, -math.inf):
        spoilt = coeffs.clone()
        spoilt[-1] = bad
        optimizers[0].plan().update_on_device(spoilt, rate, live)
    optimizers[0].plan().update_on_device(coeffs, rate, trial)
    assert same(snapshot(model), before)
    optimizers[0].plan().update_on_device(coeffs, rate, live)
    assert not same(snapshot(model), before)
    optimizers[1].lr = 0.1
    optimizers[1].plan().update(coeffs.float().tolist())
    for name, weight in snapshot(twin).items():
        torch.testing.assert_close(snapshot(model)[name], weight, rtol=1e-6, atol=1e-7)
