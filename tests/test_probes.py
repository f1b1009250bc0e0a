"""FZOO, EGGROLL, MeZO-Greedy, AdaMeZO and MeZO-SVRG, transcribed plainly; the library takes the same trajectories.

The transcriptions perturb in place, restore by subtraction and keep every vector whole.  They share with the library
nothing but the function that gives the noise of an address.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stranger
import zeroblock as zb
from toy import Tiny, distance, next_token, same, snapshot
from zeroblock.noise import Distribution, Draw, Key
from zeroblock.ops import normal
from zeroblock.train.learner import ZerothOrder

SEED, EPS, STEPS = 4, 1e-3, 18
Vectors = dict[str, Tensor]
RIGHT = 1 << 27
"""What the address of EGGROLL's second factor has added to the number of its probe."""

both_partitions = pytest.mark.parametrize("partition", [zb.whole, zb.layers], ids=["whole", "layers"])


def precise(model: nn.Module) -> Callable[[], Tensor]:
    """``next_token`` in double precision, whose one-sided differences are exact enough."""
    tokens = torch.arange(7)
    return lambda: nn.functional.cross_entropy(model(tokens), tokens.roll(-1))


class Plain:
    """θ in double precision, and the subroutines of the pseudocode."""

    def __init__(self) -> None:
        self.model = Tiny(dtype=torch.float64).requires_grad_(False)
        self.loss: Callable[[], Any] = precise(self.model)
        self.theta = dict(self.model.named_parameters())
        sizes = [p.numel() for p in self.theta.values()]
        self.offsets = dict(zip(self.theta, itertools.accumulate(sizes, initial=0), strict=False))

    def blocks(self, optimizer: zb.ZeroOrder) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Step and block, in ascending order."""
        for step in range(STEPS):
            yield step, optimizer.blocks[step // optimizer.interval % len(optimizer.blocks)].params

    def noise(self, name: str, shape: Any, step: int, probe: int, kind: Distribution = Distribution.NORMAL) -> Tensor:
        return normal(Draw(Key(SEED, step, probe), self.offsets[name], kind), tuple(shape)).double()

    def sample(self, names: tuple[str, ...], step: int, probe: int = 0, **kind: Any) -> Vectors:
        return {name: self.noise(name, self.theta[name].shape, step, probe, **kind) for name in names}

    def add(self, z: Vectors, scale: float) -> None:
        for name, value in z.items():
            self.theta[name].add_(scale * value)

    def at(self, z: Vectors, scale: float) -> float:
        """The loss at θ + scale·z."""
        self.add(z, scale)
        loss = float(self.loss())
        self.add(z, -scale)
        return loss

    def slope(self, z: Vectors) -> float:
        return (self.at(z, EPS) - self.at(z, -EPS)) / (2 * EPS)


def build(method: Any, lr: float, **options: Any) -> zb.ZeroOrder:
    return method(Tiny(dtype=torch.float64), lr, EPS, seed=SEED, schedule=zb.Ascending(), **options)


def assert_same_end(plain: Plain, optimizer: zb.ZeroOrder, **objectives: Any) -> None:
    model, start = optimizer.model, snapshot(Tiny(dtype=torch.float64))
    while optimizer.steps < STEPS:
        optimizer.step(precise(model), **objectives)
    for name, value in plain.theta.items():
        torch.testing.assert_close(model.get_parameter(name).detach(), value, rtol=1e-5, atol=1e-7)
        assert (value - start[name]).abs().max() > 1e-3  # and they went somewhere


@both_partitions
@pytest.mark.parametrize("as_published", [False, True])
def test_fzoo(partition: Any, as_published: bool) -> None:
    n, lr, plain = 3, 2e-2, Plain()
    optimizer = build(zb.fzoo, lr, probes=n, partition=partition, as_published=as_published)
    for step, names in plain.blocks(optimizer):
        u = [plain.sample(names, step, i, kind=Distribution.RADEMACHER) for i in range(n)]
        assert set(u[0][names[0]].unique().tolist()) <= {-1.0, 1.0}
        base, losses = float(plain.loss()), [plain.at(u_i, EPS) for u_i in u]
        mean = sum(losses) / n
        sigma = math.sqrt(sum((loss - mean) ** 2 for loss in losses) / (n if as_published else n - 1))
        for u_i, loss in zip(u, losses, strict=True):
            plain.add(u_i, -lr * (loss - base) / (n * sigma))
    assert_same_end(plain, optimizer)


@both_partitions
@pytest.mark.parametrize(("rank", "as_published"), [(1, False), (2, True)])
def test_eggroll(partition: Any, rank: int, as_published: bool) -> None:
    n, lr, plain = 2, 2e-2 if not as_published else 1e-1, Plain()
    optimizer = build(zb.eggroll, lr, probes=n, rank=rank, partition=partition, as_published=as_published)

    def member(names: tuple[str, ...], step: int, i: int) -> Vectors:
        e = plain.sample(tuple(name for name in names if plain.theta[name].dim() == 1), step, i)
        for name in names:
            if plain.theta[name].dim() == 2:
                (a, b), r = plain.theta[name].shape, rank
                left, right = plain.noise(name, (a, r), step, i), plain.noise(name, (b, r), step, i + RIGHT)
                e[name] = left @ right.T / math.sqrt(r)
        return e

    for step, names in plain.blocks(optimizer):
        members = [member(names, step, i) for i in range(n)]
        raw = torch.tensor([-plain.at(e, sign * EPS) for e in members for sign in (1, -1)], dtype=torch.float64)
        variance = raw.var(unbiased=False) + 1e-5 if as_published else raw.var()
        fitness = (raw - raw.mean()) / variance.sqrt()
        for i, e in enumerate(members):  # a mean over all 2n members, whose noise is ±e
            plain.add(e, lr * float(fitness[2 * i] - fitness[2 * i + 1]) / (2 * n))
    assert_same_end(plain, optimizer)


@both_partitions
@pytest.mark.parametrize("as_published", [False, True])
def test_mezo_greedy(partition: Any, as_published: bool) -> None:
    n, lr, plain = 3, 5e-3, Plain()
    optimizer = build(zb.mezo_greedy, lr, probes=n, partition=partition, as_published=as_published)
    for step, names in plain.blocks(optimizer):
        best, lowest = plain.sample(names, step), math.inf
        for i in range(n):
            z = plain.sample(names, step, i)
            loss = plain.at(z, EPS) if as_published else min(plain.at(z, EPS), plain.at(z, -EPS))
            best, lowest = (z, loss) if loss < lowest else (best, lowest)
        plain.add(best, -lr * plain.slope(best))
    assert_same_end(plain, optimizer)


@both_partitions
def test_adamezo_as_its_code_does_it(partition: Any) -> None:
    window, (b1, b2), lr, plain = 3, (0.7, 0.9), 1e-4, Plain()
    optimizer = build(zb.adamezo, lr, window=window, partition=partition, as_published=True)
    history: dict[str, list[tuple[int, float]]] = {}
    for step, names in plain.blocks(optimizer):
        c = plain.slope(plain.sample(names, step))
        for name in names:
            steps = history.setdefault(name, [])
            steps.append((step, c))
            shape = plain.theta[name].shape
            if len(steps) <= window + 1:
                plain.theta[name].sub_(lr * c * plain.noise(name, shape, step, 0))
                continue
            m, v = torch.zeros(shape).double(), torch.zeros(shape).double()
            for i, (past, coeff) in enumerate(steps[-window:]):
                z = plain.noise(name, shape, past, 0)
                m += coeff * b1 ** (window - 1 - i) * z
                v += coeff**2 * b2 ** (window - 1 - i) * z**2
            plain.theta[name].sub_(lr * m / (v**0.5 + 1e-5) * 100)
    model = optimizer.model
    while optimizer.steps < STEPS:
        optimizer.step(precise(model))
    for name, value in plain.theta.items():  # the moments are fp32 in the library
        torch.testing.assert_close(model.get_parameter(name).detach(), value, rtol=1e-4, atol=1e-5)


def test_adamezo_is_adam_while_its_window_lasts() -> None:
    """And another method after it; with a window of one step it is the sign of the estimate."""
    for window, twin, alike in (
        (6, zb.mezo_adam(Tiny(), 1e-2, rule=zb.Adam((0.7, 0.9), reset=False)), True),
        (3, zb.mezo_adam(Tiny(), 1e-2, rule=zb.Adam((0.7, 0.9), reset=False)), False),
        (1, zb.zo_sign(Tiny(), 1e-2), True),
    ):
        model = Tiny()
        for optimizer in (zb.adamezo(model, 1e-2, window=window), twin):
            for _ in range(6):
                optimizer.step(next_token(optimizer.model))
        pairs = zip(snapshot(model).values(), snapshot(twin.model).values(), strict=True)
        assert (max(float((a - b).abs().max()) for a, b in pairs) < 1e-4) == alike


@pytest.mark.parametrize("subspace", [zb.LowRank(2), zb.Bernoulli(0.5), stranger.Axis()], ids=repr)
def test_estimates_of_earlier_turns_follow_the_basis_and_replay(subspace: Any) -> None:
    """Or are forgotten, where a basis does not say how."""
    build = functools.partial(zb.adamezo, lr=1e-3, window=4, interval=3, subspace=subspace, probes=2)
    model, again, records = Tiny(dtype=torch.bfloat16), Tiny(dtype=torch.bfloat16), []
    optimizer = build(model)
    for _ in range(9):
        optimizer.step(next_token(model))
        records.append(optimizer.record)
    zb.replay(build(again), records)
    assert same(snapshot(model), snapshot(again))
    past = optimizer.state_dict()["state"]["layers.0.up.weight"]["past"]
    assert [step for _, step, _ in past] == [8, 7, 6]
    optimizer.step(next_token(model))
    past = optimizer.state_dict()["state"]["layers.0.up.weight"]["past"]
    assert [step for _, step, _ in past] == ([9] if isinstance(subspace, stranger.Axis) else [9, 8, 7])


@both_partitions
@pytest.mark.parametrize("boost", [1.0, 3.0])
def test_mezo_svrg(partition: Any, boost: float) -> None:
    lr, q, plain = 2e-3, 3, Plain()
    optimizer = build(zb.mezo_svrg, lr, interval=q, boost=boost, partition=partition)
    full, small = distance(plain.model), plain.loss
    for step, names in plain.blocks(optimizer):
        z = plain.sample(names, step)
        if step % q == 0:  # the full batch
            plain.loss = full
            anchor, g, z_g = {name: plain.theta[name].clone() for name in names}, plain.slope(z), z
            plain.add(z, -lr * boost * g)
            continue
        plain.loss = small
        here, now = plain.slope(z), {name: plain.theta[name].clone() for name in names}
        for name in names:
            plain.theta[name].copy_(anchor[name])
        there = plain.slope(z)
        for name in names:
            plain.theta[name].copy_(now[name])
        plain.add(z, -lr * (here - there))
        plain.add(z_g, -lr * g)
    assert_same_end(plain, optimizer, anchor=distance(optimizer.model))


def test_one_anchor_is_in_memory() -> None:
    """Steps that are over hold the anchor that they measured at until garbage is collected."""
    model, tokens = Tiny(), torch.arange(7)
    optimizer, places = zb.mezo_svrg(model, 1e-3, interval=2), set()
    for _ in range(8):
        optimizer.step(lambda: nn.functional.cross_entropy(model(tokens), tokens.roll(-1)))
        places.add(tuple(copy.data_ptr() for copy in optimizer.weights.anchor.values()))
    assert len(places) == 1


def test_an_anchor_is_asked_for_at_the_beginning_of_a_turn_alone() -> None:
    model = Tiny()
    optimizer, asked = zb.mezo_svrg(model, 1e-3, interval=3, batches=5), []
    for _ in range(7):
        worth = optimizer.anchoring
        optimizer.step(lambda: asked.append("small") or 0.5, anchor=lambda: asked.append("large") or 1.0)
        assert worth == (5 if asked[-1] == "large" else 0)
    turn = ["large"] * 2 + ["small"] * 8
    assert asked == [*turn, *turn, "large", "large"]
    learner = ZerothOrder(zb.mezo_svrg(model, interval=2, batches=5), lambda record: None)
    joined = []
    for _ in range(3):
        joined.append(learner.batches)  # as many as ``zeroblock train`` joins
        learner.step([next_token(model)], 1e-3)
    assert joined == [5, 1, 5]
    assert zb.mezo_bcd(Tiny()).anchoring == 0
    for options in ({"restore": "subtract"}, {"subspace": zb.LowRank(2), "interval": 4, "fold": 2}):
        with pytest.raises(zb.ZeroBlockError, match="leave"):
            zb.mezo_svrg(Tiny(), **options)


def test_losses_that_are_equal_move_nothing_and_a_bad_one_skips_the_step() -> None:
    model = Tiny()
    optimizer = zb.fzoo(model, 1e-2, probes=3)
    optimizer.step(lambda: 2.0 + 0.0 * float(next_token(model)()))
    assert optimizer.record.coeffs == (0.0, 0.0, 0.0)
    values = itertools.cycle([1.0, math.nan, 1.0, 2.0])
    with pytest.warns(zb.ZeroBlockWarning, match="not finite"):
        optimizer.step(lambda: next(values) + 0.0 * float(next_token(model)()))
    greedy = zb.mezo_greedy(model, 1e-2, probes=2)
    values = itertools.cycle([1.0, 2.0, math.nan, 2.0])
    with pytest.warns(zb.ZeroBlockWarning, match="not finite"):
        greedy.step(lambda: next(values) + 0.0 * float(next_token(model)()))
    assert same(snapshot(model), snapshot(Tiny()))
    for bad in ({"probes": 1}, {"sides": 3}, {"floor": -1.0}):
        with pytest.raises(zb.ZeroBlockError, match="Standardized: "):
            zb.Standardized(**bad)
