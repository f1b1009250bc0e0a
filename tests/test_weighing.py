"""Schedules that weigh steps, choose several blocks or know what steps cost: right on average, exact in replay."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroblock as zb
from toy import Tiny, next_token, same, snapshot
from zeroblock import fused
from zeroblock.engine.cost import Costs, Work, relative, sample, timed, works
from zeroblock.noise import SCHEDULE, Draw, Key
from zeroblock.ops import normal, uniform
from zeroblock.schedule import Adaptive, Bandit, Economical, Proportional, Schedule, Subset, by_name
from zeroblock.turn import Turns

SCORES = [8.0, 1.0, 0.5, 0.0, 2.0]
COSTS = (2.0, 1.8, 1.4, 1.1, 0.6)
RECORDS = Path(__file__).parents[1] / "results" / "lab" / "blocks_records.jsonl"


@pytest.mark.parametrize("schedule", [Economical(), Economical(COSTS), Economical(COSTS, 0.0), Bandit(0.6, limit=1e9)])
def test_every_block_has_the_same_expected_weight(schedule: Economical | Bandit) -> None:
    """1/N for one block per turn; 1 for the bandit, whose steps are of the whole model."""
    turns, total, squares = 800, Counter[int](), Counter[int]()
    for turn in range(turns):
        for block, weight in schedule.choose(turn, 5, 3, SCORES).items():
            total[block] += weight
            squares[block] += weight**2
    want = 1.0 if isinstance(schedule, Bandit) else 0.2
    for block in range(5):
        deviation = math.sqrt(squares[block] / turns - (total[block] / turns) ** 2)
        assert abs(total[block] / turns - want) < 6 * deviation / math.sqrt(turns)
    assert len({round(1e6 * p) for p in schedule.probabilities(SCORES)}) > 1


def test_the_step_of_an_economical_schedule_is_the_mean_step_of_all_blocks() -> None:
    """On a quadratic, from one and the same place: the mean step is the gradient over the number of blocks."""
    model = nn.ParameterList(nn.Parameter(torch.full((1,), float(size))) for size in (4, 1, 0.25))
    start, steps = snapshot(model), 400
    optimizer = zb.ZeroOrder(
        model, 1.0, partition=[[name] for name in start], schedule=Economical((3.0, 1.0, 1.0)), seed=1,
        distribution=zb.Distribution.RADEMACHER,  # on one weight its estimate is exact: what is random is the block
    )  # fmt: skip
    moved = {name: torch.zeros(steps, 1) for name in start}
    for step in range(steps):
        optimizer.step(lambda: sum(p.square().sum() for p in model) / 2)
        assert optimizer.record.lr <= 5.0  # one over the floor
        with torch.no_grad():
            for name, p in model.named_parameters():
                moved[name][step] = start[name] - p
                p.copy_(start[name])
    for name, each in moved.items():
        assert ((each.mean(0) - start[name] / 3).abs() < 6 * each.std(0) / math.sqrt(steps)).all()
    shares = Counter(optimizer.schedule.choose(t, 3, 1, optimizer.scores).popitem()[0] for t in range(150))
    assert shares[0] > shares[1] > shares[2] > 150 * 0.2 / 3


def test_no_probabilities_make_more_progress_per_second() -> None:
    z, cost = [3.0, 1.0, 0.5, 2.0], [2.0, 1.0, 0.5, 0.7]

    def seconds(p: list[float]) -> float:
        noise = sum(v * v / q for v, q in zip(z, p, strict=True))
        return noise * sum(q * t for q, t in zip(p, cost, strict=True))

    best = seconds(Economical(tuple(cost), floor=1e-9).probabilities(z))
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        p = torch.rand(4, generator=generator) + 0.01
        assert seconds((p / p.sum()).tolist()) >= best * (1 - 1e-6)


def test_scores_have_no_scale_and_no_block_starves() -> None:
    for schedule in (Proportional(), Economical(COSTS)):
        p = schedule.probabilities(SCORES)
        assert p == pytest.approx(schedule.probabilities([1e6 * score for score in SCORES]))
        assert min(p) >= schedule.floor / 5
        assert math.fsum(p) == pytest.approx(1)
        counts = Counter(schedule.pick(t, 5, 0, SCORES) for t in range(50))
        assert all(abs(counts[b] - 50 * p[b]) <= 10 for b in range(5))  # ten cycles, each to within one visit
    assert Proportional(power=0.0).probabilities(SCORES) == pytest.approx([0.2] * 5)
    scores = [0.0] * 3
    for block, c in ((1, 4.0), (0, -1.0), (1, 8.0)):
        Proportional(decay=0.5).observe(scores, block, (c,))
    assert scores == pytest.approx([0.5 * 1 + 0.5 * 4, 0.5 * 8 + 0.5 * 4, 0.0])


def test_on_real_coefficients_the_paper_collapses_to_the_embedding_and_proportional_does_not() -> None:
    """Coefficients of 160 steps of SmolLM2, drawn again and again; every block has three at least."""
    seen: dict[int, list[float]] = {}
    for line in RECORDS.read_text().splitlines():
        record = json.loads(line)
        seen.setdefault(record["block"], []).append(record["coeffs"][0])
    n, steps = len(seen), 800
    shares = {}
    for schedule in (Adaptive(warmup=96), Proportional()):
        turns = Turns(schedule, n, interval=1, seed=0)
        turn, counts = turns.first(), Counter[int]()
        for step in range(steps):
            counts[turn.block] += step >= 96
            mine = seen[turn.block]
            turn = turns.observed(turns.counted(turn), turn.block, (mine[step * 7 % len(mine)],))
            turn = turns.entered(turn)
        shares[type(schedule)] = [counts[block] / (steps - 96) for block in range(n)]
    assert shares[Adaptive][0] > 0.9
    assert max(shares[Proportional]) < 0.4
    assert min(shares[Proportional]) > 0.3 * Proportional().floor / n


def run(optimizer: zb.ZeroOrder, steps: int) -> list[zb.Record]:
    records = []
    while optimizer.steps < steps:
        optimizer.step(next_token(optimizer.model))
        records.append(optimizer.record)
    return records


@pytest.mark.parametrize("schedule", [Economical((3.0, 1.0, 2.0, 1.0, 0.5)), Bandit(0.6), Subset(0.6)], ids=str)
def test_replay_resume_and_schedulers_see_the_weights(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    build = lambda model: zb.ZeroOrder(model, 1e-2, schedule=schedule, interval=3, weight_decay=0.1)  # noqa: E731
    model = Tiny(dtype=torch.bfloat16)
    optimizer = build(model)
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    records, weights, state = [], [], None
    for step in range(14):
        weights.append(optimizer.turn.weight)
        optimizer.step(next_token(model))
        records.append(optimizer.record)
        rates.step()
        if step == 6:  # within a turn
            state, halfway = optimizer.state_dict(), snapshot(model)
    assert [r.lr for r in records] == pytest.approx([1e-2 * 0.9**i * w for i, w in enumerate(weights)], rel=1e-12)
    assert optimizer.lr == pytest.approx(1e-2 * 0.9**14)
    again = Tiny(dtype=torch.bfloat16)
    replayed = build(again)
    zb.replay(replayed, records)
    assert same(snapshot(again), snapshot(model))
    assert (replayed.turn, replayed.lr) == (optimizer.turn, 1e-2)
    for name, p in again.named_parameters():
        p.data.copy_(halfway[name])
    resumed = build(again)
    resumed.load_state_dict(state)
    zb.replay(resumed, records[7:])
    assert same(snapshot(again), snapshot(model))
    taken = []  # a GPU takes the steps of each block together, which has a learning rate of its own

    def advance(optimizer: zb.ZeroOrder, visits: dict[int, list[zb.Record]], report: object) -> None:
        taken.extend((block, record.step, record.lr) for block, records in visits.items() for record in records)

    monkeypatch.setattr(fused, "serves", lambda optimizer: True)
    monkeypatch.setattr(fused, "advance", advance)
    zb.replay(build(Tiny(dtype=torch.bfloat16)), records)
    turns = Turns(schedule, 5, 3, 0)
    turn, want = turns.first(), []
    for record in records:
        want += [(block, record.step, record.lr * factor) for block, factor in turn.active]
        turn = turns.after(turn, record)
    assert sorted(taken) == sorted(want)


def test_adam_has_memory_for_every_block_of_a_turn() -> None:
    model = Tiny()
    optimizer = zb.ZeroOrder(model, 1e-2, schedule=Subset(1.0), rule=zb.Adam(), interval=4)
    one = Tiny()
    whole = zb.ZeroOrder(one, 1e-2, partition=zb.whole, rule=zb.Adam(), interval=4)
    run(optimizer, 9)
    run(whole, 9)
    assert same(snapshot(model), snapshot(one))


def transcribed(model: nn.Module, active: dict[str, float], loss: object, step: int, lr: float, eps: float) -> float:
    """One step of MeZO on some tensors, in place, each with its own factor on the learning rate; the coefficient."""
    params = dict(model.named_parameters())
    starts, total = {}, 0
    for name, p in params.items():
        starts[name], total = total, total + p.numel()
    z = {name: normal(Draw(Key(0, step), starts[name]), params[name].shape).double() for name in active}
    with torch.no_grad():
        for name in active:
            params[name].add_(eps * z[name])
        plus = float(loss())
        for name in active:
            params[name].sub_(2 * eps * z[name])
        c = (plus - float(loss())) / (2 * eps)
        for name, factor in active.items():
            params[name].add_((eps - lr * factor * c) * z[name])
    return c


@pytest.mark.parametrize("name", ["lezo", "adalezo"])
def test_the_published_algorithms(name: str) -> None:
    """LeZO's random layers, and AdaLeZO's bandit with its weights, written plainly."""
    lr, steps, k = 3e-3, 40, 2
    paper, model = Tiny(dtype=torch.float64), Tiny(dtype=torch.float64)
    optimizer = zb.METHODS[name](model, lr, keep=0.4, **({"floor": 0.3} if name == "adalezo" else {}))
    layers = [block.params for block in optimizer.blocks]
    n, rewards, chosen = len(layers), [0.0] * len(layers), Counter[int]()
    for t in range(steps):
        if name == "lezo":  # R(z, ρ, s): a random k = (1 - ρ)·n of the layers keep their perturbation
            draws = uniform(Key(0, t, stream=SCHEDULE), n)
            weights = dict.fromkeys(sorted(range(n), key=draws.__getitem__)[:k], 1.0)
        else:
            scores = [r / max(rewards) for r in rewards] if max(rewards) > 1e-6 else rewards
            powers = [math.exp(s / 0.2) for s in scores]
            p = [0.7 * e / sum(powers) + 0.3 / n for e in powers]
            counts = Counter[int]()
            for u in uniform(Key(0, t, probe=1, stream=SCHEDULE), k):
                counts[next(i for i in range(n) if u < sum(p[: i + 1]) or i == n - 1)] += 1
            weights = {i: min(1 / (k * p[i]), 32.0) * count for i, count in counts.items()}
        active = {param: weight for i, weight in weights.items() for param in layers[i]}
        c = transcribed(paper, active, next_token(paper), t, lr, 1e-3)
        if name == "adalezo":
            for i in weights:
                rewards[i] = 0.9 * rewards[i] + 0.1 * abs(c)
        chosen.update(weights)
        optimizer.step(next_token(model))
        assert optimizer.record.coeffs[0] == pytest.approx(c, rel=1e-4, abs=1e-6)
        assert optimizer.record.block == next(iter(weights))
    assert len(chosen) > k
    for param, p in paper.named_parameters():
        torch.testing.assert_close(model.get_parameter(param).detach(), p.detach(), rtol=1e-6, atol=1e-8)
    assert optimizer.scores == pytest.approx(rewards, rel=1e-4)


def test_the_cost_model_has_the_shape_of_a_forked_step() -> None:
    blocks = zb.layers(Tiny())
    work = works(Tiny(), blocks)
    assert [block.name for block in blocks] == ["embed", "layers.0", "layers.1", "layers.2", "norm"]
    assert [one.prefix for one in work] == pytest.approx([0, 0, 1 / 3, 2 / 3, 1])
    assert [(one.weights, one.outside) for one in work] == [(0, 42), (83, 0), (83, 0), (83, 0), (0, 12)]
    true = Costs(whole=2.0, saved=1.1, noise=3e-3, outer=9e-3, held=0.9)
    held = [dataclasses.replace(one, held=True) for one in work]
    fit = Costs.fit([*work, *held], [true.of(one) for one in (*work, *held)])
    assert dataclasses.astuple(fit) == pytest.approx(dataclasses.astuple(true))
    plain = Costs.fit(
        work, [true.of(one) * wrong for one, wrong in zip(work, (1.02, 0.98, 1.02, 0.98, 1.0), strict=True)]
    )
    assert all(plain.of(one) == pytest.approx(true.of(one), rel=0.05) for one in work)
    assert plain.held == 0
    costs = relative(plain, work)
    assert sum(costs) == pytest.approx(5, rel=0.01)
    assert costs[1] > costs[2] > costs[3] > costs[4]
    assert sample([Work(0.0, i) for i in (1, 1, 9, 1, 1, 1, 1)], 3) == [0, 2, 3, 6]
    calls = iter([9.0, 9.0, 1.0, 10.0, 3.0, 30.0, 2.0, 20.0])
    assert timed(lambda block: next(calls), [4, 7], rounds=3) == [2.0, 20.0]
    with pytest.raises(zb.ZeroBlockError, match="a positive time per block"):
        Costs.fit(work, [0.0] * 5)


def test_names_and_mistakes() -> None:
    assert by_name("economical:2,1") == Economical((2.0, 1.0))
    assert by_name("economical:2,1;decay=0") == Economical((2.0, 1.0), decay=0.0)
    for text, message in (
        ("uniform;decay=0", "takes nothing after a colon"),
        ("economical:2,x", "numbers with commas between"),
        ("uniform:2", "takes nothing after a colon"),
        ("economical:0,1", "costs must be positive"),
    ):
        with pytest.raises(zb.ZeroBlockError, match=message):
            by_name(text)
    with pytest.raises(zb.ZeroBlockError, match="2 costs for 5 blocks"):
        zb.mezo_bcd(Tiny(), schedule=Economical((1.0, 2.0)))
    with pytest.raises(zb.ZeroBlockError, match="floor must be positive"):
        Economical(floor=0.0)
    with pytest.raises(zb.ZeroBlockError, match=r"keep must be in \(0, 1\]"):
        zb.lezo(Tiny(), keep=0.0)
