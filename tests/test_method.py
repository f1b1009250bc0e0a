"""One table of methods, one set of tests: joining the table is passing these."""

from __future__ import annotations

import io
import itertools

import pytest
import torch
from torch import nn

import zeroblock as zb
from toy import DTYPES, Tiny, bits, distance, next_token, peak_bytes, same, snapshot
from zeroblock.basis import Basis, Factored, Framed
from zeroblock.method import CITATIONS, METHODS, describe, get
from zeroblock.rule import SGD
from zeroblock.run import host
from zeroblock.step import Called

every_method = pytest.mark.parametrize("name", METHODS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def in_turn(*values: object, shift: int = 0) -> list[tuple[object, ...]]:
    """Every method with one of the values, in turn; test_parts has every part with several dtypes."""
    return [(name, values[(number + shift) % len(values)]) for number, name in enumerate(METHODS)]


RATES = {
    "mezo_adam": 2e-2, "mezo_bcd_adam": 5e-2, "zo_sign": 1e-2, "lozo": 2e-3, "lozo_m": 2e-3, "zo_muon": 4e-2,
    "adalezo": 2e-3, "hizoo": 8e-3,
}  # fmt: skip
BLOCKWISE = {"mezo_bcd": 2e-2, "mezo_bcd_adaptive": 2e-2}
PROBES = {"fzoo": 3, "fzoo_bcd": 3, "eggroll": 2, "mezo_greedy": 2}  # fewer than by default, to save time
STANDARDIZED = {"fzoo": 5e-2, "fzoo_bcd": 5e-2, "eggroll": 5e-2, "adamezo": 2e-2}
LIKE_OTHERS = {
    "mezo_adam", "zo_sign", "zo_momentum", "conmezo", "lozo_m", "mezo_bcd_adam",
    "fzoo", "fzoo_bcd", "mezo_greedy", "mezo_svrg", "adamezo",
}  # fmt: skip
"""Methods with another rule alone, or with coefficients that are not linear in the losses, and others' directions."""


def build(name: str, model: nn.Module, **options: object) -> zb.ZeroOrder:
    if "interval" not in options and name in ("lozo", "lozo_m", "mezo_bcd_adam", "subzero", "zo_muon"):
        options["interval"] = 7  # several turns within a short test
    if name in ("subzero", "zo_muon"):
        options.setdefault("rank", 4)
    if name == "hizoo":
        options.setdefault("alpha", 1e-3)  # so that a short run feels the curvature
    if name in PROBES:
        options.setdefault("probes", PROBES[name])
    return METHODS[name](model, **{"lr": {**RATES, **BLOCKWISE, **STANDARDIZED}.get(name, 4e-3), **options})


@every_method
def test_descends_a_quadratic(name: str) -> None:
    model = Tiny(depth=1)
    loss = distance(model)
    before = float(loss())
    optimizer = build(name, model, seed=3, **({"lr": 3e-2} if name == "zo_sign" else {}))
    goal = (0.9 if name == "sparse_mezo" else 0.7) * before  # its mask freezes most of the way
    for _ in range(25):
        for _ in range(10):
            optimizer.step(loss)
        if float(loss()) < goal:
            return
    pytest.fail(f"from {before} to {float(loss())}, not to {goal}")


@every_method
@every_dtype
def test_measuring_leaves_the_weights_alone(name: str, dtype: torch.dtype) -> None:
    """Bit-identical afterwards, and never written meanwhile: not even while the objective runs."""
    model = Tiny(dtype=dtype)
    optimizer = build(name, model, probes=2)
    before = snapshot(model)
    storage = {n: p.data for n, p in model.named_parameters()}
    where = {n: t.data_ptr() for n, t in storage.items()}
    loss, seen = next_token(model), []

    def objective() -> float:
        assert same(storage, before)  # the tensors behind θ, looked at during the measurement
        seen.append(float(loss()))
        return seen[-1]

    estimate = host.measure(optimizer.plan(), Called(objective))
    assert len(set(seen)) > 1, "the objective saw no perturbation"
    assert estimate.losses.tolist() == seen
    assert same(snapshot(model), before)
    assert where == {n: p.data_ptr() for n, p in model.named_parameters()}


@every_method
@pytest.mark.parametrize(("error", "at"), [(RuntimeError, 1), (KeyboardInterrupt, 0)])
def test_an_exception_leaves_the_weights_alone(name: str, error: type[BaseException], at: int) -> None:
    model = Tiny(dtype=torch.bfloat16)
    model.train()
    optimizer, loss, calls = build(name, model), next_token(model), itertools.count()
    before = snapshot(model)

    def objective() -> torch.Tensor:
        value = loss()
        if next(calls) == at:
            raise error("in the middle")
        return value

    with pytest.raises(error):
        optimizer.step(objective)
    assert same(snapshot(model), before)
    assert model.training
    assert optimizer.steps == 0
    assert torch.isfinite(optimizer.step(objective))  # and the next step is as if nothing had happened
    clean = Tiny(dtype=torch.bfloat16)
    build(name, clean).step(next_token(clean))
    assert same(snapshot(model), snapshot(clean))


@pytest.mark.parametrize(("name", "dtype"), in_turn(*DTYPES))
def test_only_the_active_block_moves(name: str, dtype: torch.dtype) -> None:
    model = Tiny(dtype=dtype)
    optimizer, loss = build(name, model), next_token(model)
    for _ in range(10):  # every block, and a second turn of those that stay for seven steps
        before = snapshot(model)
        active = {name for block, _ in optimizer.turn.active for name in optimizer.blocks[block].params}
        optimizer.step(loss)
        after = snapshot(model)
        moved = {n for n in before if not torch.equal(bits(before[n]), bits(after[n]))}
        assert moved
        assert moved <= active


@pytest.mark.parametrize(("name", "dtype"), in_turn(*DTYPES, shift=1))
def test_replay_is_bit_exact(name: str, dtype: torch.dtype) -> None:
    model = Tiny(dtype=dtype)
    optimizer, loss = build(name, model, probes=2, weight_decay=0.01), next_token(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=18)
    records = []
    for i in range(18):  # turns end after 7 and 14 steps
        if i == 11:
            with pytest.warns(zb.ZeroBlockWarning, match="step 11 is not finite"):
                optimizer.step(lambda: float("nan"))
        else:
            optimizer.step(loss)
        records.append(optimizer.record)
        scheduler.step()
        if i == 12:
            halfway = snapshot(model)
    again = Tiny(dtype=dtype)
    replayed = build(name, again, probes=2, weight_decay=0.01)
    with pytest.warns(zb.ZeroBlockWarning, match="step 11"):
        zb.replay(replayed, records[:13])
    assert same(snapshot(again), halfway)
    zb.replay(replayed, records[13:])
    assert same(snapshot(again), snapshot(model))
    assert not same(snapshot(again), snapshot(Tiny(dtype=dtype)))
    assert replayed.scores == optimizer.scores
    assert replayed.skipped == optimizer.skipped == 1


LENGTH = 18
"""Steps of a run that is cut: turns of seven steps end twice."""


def start(name: str, model: nn.Module) -> tuple[zb.ZeroOrder, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = build(name, model, seed=5)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, LENGTH)


def run(model: nn.Module, optimizer: zb.ZeroOrder, scheduler: object, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(float(optimizer.step(next_token(model))))
        scheduler.step()
    return losses


CUTS = [(dtype, cut) for cut in (7, 12, 0) for dtype in DTYPES]
"""Every dtype, cut at a turn's end, within one or at the beginning."""


@pytest.mark.parametrize(("name", "dtype_and_cut"), in_turn(*CUTS, shift=2))
def test_resumed_equals_uninterrupted(name: str, dtype_and_cut: tuple[torch.dtype, int]) -> None:
    dtype, cut = dtype_and_cut
    whole = Tiny(dtype=dtype)
    expected = run(whole, *start(name, whole), LENGTH)
    first = Tiny(dtype=dtype)
    optimizer, scheduler = start(name, first)
    losses = run(first, optimizer, scheduler, cut)
    file = io.BytesIO()
    torch.save({"m": first.state_dict(), "o": optimizer.state_dict(), "s": scheduler.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)

    second = Tiny(dtype=dtype)
    second.load_state_dict(saved["m"])  # before the optimizer, which must not take these weights for the initial ones
    optimizer, scheduler = start(name, second)
    optimizer.load_state_dict(saved["o"])
    scheduler.load_state_dict(saved["s"])
    losses += run(second, optimizer, scheduler, LENGTH - cut)
    assert losses == expected
    assert same(snapshot(second), snapshot(whole))


def gain(basis: Basis, numel: int) -> float:
    """What E[PPᵀ] multiplies a gradient by: r without a factor 1/r, and a share of the space between frames."""
    if isinstance(basis, Framed):
        return basis.gain**2 * basis.size / numel
    return basis.rank if isinstance(basis, Factored) else 1.0


@pytest.mark.parametrize("name", [name for name in METHODS if name not in LIKE_OTHERS])
def test_the_estimate_is_unbiased(name: str) -> None:
    """E[c·Pz] = E[PPᵀ]∇f on a linear f, within four standard errors a block of coordinates.

    With K draws in s dimensions the relative error in norm is about √((s + 1)/K).
    """
    model = Tiny(width=3, depth=1, vocabulary=4, tied=False)
    generator = torch.Generator().manual_seed(2)
    slope = {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}
    start = snapshot(model)

    def linear() -> torch.Tensor:
        return sum((slope[n] * p).sum() for n, p in model.named_parameters())

    made = build(name, model, lr=1.0, eps=1.0, interval=1)
    optimizer = zb.ZeroOrder(  # the other rules are not linear in the estimate
        model, 1.0, partition=made.partition, schedule=made.schedule, subspace=made.subspace,
        estimator=zb.TwoSided(1.0) if name == "eggroll" else made.estimator, rule=SGD(), interval=1,
    )  # fmt: skip
    total = {n: torch.zeros_like(p) for n, p in start.items()}
    weights: dict[str, list[float]] = {n: [] for n in start}
    draws = 150 if made.parts["subspace"].startswith("Frames") else 450  # a decomposition per draw
    for _ in range(draws):
        turn = optimizer.turn
        optimizer.step(linear)
        for n, factor in [(n, factor) for block, factor in turn.active for n in optimizer.blocks[block].params]:
            p = model.get_parameter(n)
            total[n] += start[n] - p.detach()
            weights[n].append(turn.weight * factor)
            p.data.copy_(start[n])
    everywhere = torch.cat([slope[n].flatten() for n in start]).norm()
    bases = {n: optimizer.weights.basis(n, 0) for n in start}
    rank = max(getattr(basis, "rank", 1) for basis in bases.values())
    for block in optimizer.blocks:
        got, want = [], []
        for n in block.params:
            expected = slope[n] * gain(bases[n], start[n].numel())
            if optimizer.weights.initial[n] is not None:
                expected = expected * (start[n].abs() <= optimizer.weights.initial[n])
            got.append((total[n] / sum(weights[n])).flatten())
            want.append(expected.flatten())
        g, w = torch.cat(got), torch.cat(want)
        mine = torch.tensor(weights[block.params[0]])
        spread = (w.numel() + 1) ** 0.5 * rank**0.5 * float(mine.norm() / mine.sum())
        reach = everywhere if optimizer.turns.most > 1 else w.norm()  # the other blocks of a step are noise
        assert (g - w).norm() < 4 * spread * reach
        assert torch.dot(g, w) > w.square().sum() - 4 * spread * reach * w.norm()


@every_method
def test_extra_memory_is_bounded(name: str) -> None:
    """A whole-model method needs its largest layer at most, a block method its block; the rule's state apart."""
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
    x = torch.randn(1, 256)

    def loss() -> torch.Tensor:
        h = x
        for layer in model.layers:
            h = torch.tanh(layer(h))
        return h.square().mean()

    optimizer = build(name, model)
    for _ in range(8):  # compile, and let the rule make its state
        optimizer.step(loss)
    layer = 256 * 257 * 4
    activations = 64 * 1024
    with torch.no_grad():
        assert peak_bytes(lambda: host.measure(optimizer.plan(), Called(loss))) < layer + activations


def test_subtraction_needs_no_copy() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(2))
    optimizer = zb.mezo(model, restore="subtract")
    run = lambda: host.measure(optimizer.plan(), Called(lambda: 0.0))  # noqa: E731
    run()
    assert peak_bytes(run) < 1024


def test_descriptions_come_from_the_factories() -> None:
    for name, factory in METHODS.items():
        row = describe(factory)
        assert row["name"] == name
        assert row["summary"].endswith((".", "weight"))
        assert row["citation"] == CITATIONS[name]
    assert describe(METHODS["mezo_bcd_adam"])["parts"]["interval"] == "50"
    assert describe(METHODS["lozo"])["parts"]["subspace"].startswith("LowRank(rank=2")
    assert describe(METHODS["mezo"])["parts"]["partition"] == "whole"


def test_an_unknown_method_suggests_the_nearest() -> None:
    with pytest.raises(zb.ZeroBlockError, match="did you mean 'mezo_bcd'"):
        get("mezo_bdc")
    with pytest.raises(zb.ZeroBlockError, match="choose from: mezo, "):
        get("xxxxxxxxxxx")


def test_a_replay_leaves_the_learning_rate_as_it_was() -> None:
    model = Tiny()
    optimizer, records = zb.mezo_bcd(model, 1e-2), []
    for lr in (1e-2, 1e-3, 1e-4):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step(next_token(model))
        records.append(optimizer.record)
    other = zb.mezo_bcd(Tiny(), 5e-2)
    zb.replay(other, records)
    assert other.param_groups[0]["lr"] == 5e-2
