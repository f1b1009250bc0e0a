"""Things that are the same by construction, checked to be the same."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import zeroblock as zb
from toy import DTYPES, Tiny, bits, next_token, same, snapshot
from zeroblock.basis import Factored
from zeroblock.noise import Draw, Key
from zeroblock.ops import normal


def trained(build, dtype=torch.float32, steps: int = 25, model=None) -> dict[str, torch.Tensor]:
    model = model or Tiny(dtype=dtype)
    optimizer = build(model)
    for _ in range(steps):
        optimizer.step(next_token(model))
    return snapshot(model)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_block_is_the_whole(dtype: torch.dtype) -> None:
    """Block descent with N = 1 (copies swapped in) equals MeZO (copies made just in time), to the bit."""
    names = [n for n, _ in Tiny().named_parameters()]
    dense = trained(lambda m: zb.mezo(m, lr=1e-2), dtype)
    for schedule in (zb.Shuffled(), zb.FlipFlop(), zb.Adaptive(), zb.Uniform(), zb.Descending()):
        assert same(trained(lambda m, s=schedule: zb.mezo_bcd(m, 1e-2, partition=[names], schedule=s), dtype), dense)
    depth = functools.partial(zb.layers, k=99)
    one = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    assert len(depth(one)) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_swapped_copy_equals_one_made_just_in_time(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = trained(lambda m: zb.mezo(m, lr=1e-2), dtype)
    monkeypatch.setattr("zeroblock.weights.Weights.opaque", True)
    assert same(trained(lambda m: zb.mezo(m, lr=1e-2), dtype), reference)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keeping_everything_is_full(dtype: torch.dtype) -> None:
    full = trained(lambda m: zb.mezo(m, lr=1e-2), dtype)
    assert same(trained(lambda m: zb.sparse_mezo(m, lr=1e-2, keep=1.0), dtype), full)
    assert same(trained(lambda m: zb.mezo(m, lr=1e-2, subspace=zb.Bernoulli(1.0)), dtype), full)
    assert not same(trained(lambda m: zb.sparse_mezo(m, lr=1e-2, keep=0.9), dtype), full)
    assert not same(trained(lambda m: zb.mezo(m, lr=1e-2, subspace=zb.Bernoulli(0.9)), dtype), full)


def test_no_momentum_is_sgd() -> None:
    sgd = trained(lambda m: zb.mezo(m, lr=1e-2), torch.float64)
    none = trained(lambda m: zb.zo_momentum(m, lr=1e-2, beta=0.0), torch.float64)
    some = trained(lambda m: zb.zo_momentum(m, lr=1e-2, beta=0.5), torch.float64)
    for n in sgd:
        torch.testing.assert_close(none[n], sgd[n], rtol=1e-4, atol=1e-5)
    assert max((some[n] - sgd[n]).abs().max() for n in sgd) > 1e-3
    assert same(trained(lambda m: zb.lozo_m(m, 1e-3, beta=0.0)), trained(lambda m: zb.lozo_m(m, 1e-3, beta=0.0)))


def test_an_interval_of_one_is_unheld() -> None:
    assert same(
        trained(lambda m: zb.mezo_bcd(m, 1e-2, interval=1)),
        trained(lambda m: zb.ZeroOrder(m, 1e-2, partition=zb.layers, schedule=zb.Shuffled())),
    )
    held = zb.mezo_bcd(Tiny(), 1e-2, interval=4)
    picked = []
    for _ in range(20):
        held.step(lambda: 0.0)
        picked.append(held.record.block)
    assert all(len(set(picked[i : i + 4])) == 1 for i in range(0, 20, 4))
    assert sorted(picked[::4]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_block_noise_is_the_restriction_of_dense_noise(dtype: torch.dtype) -> None:
    """A block's move is the dense move on that block, whatever the partition and whatever is frozen elsewhere."""
    start, coeff, lr = snapshot(Tiny(dtype=dtype)), 1.5, 1e-2
    record = zb.Record(0, 0, (coeff,), lr, (), 0.0)

    def moved(frozen: str | None = None, **parts: object) -> dict[str, torch.Tensor]:
        model = Tiny(dtype=dtype)
        for n, p in model.named_parameters():
            p.requires_grad_(not (frozen and n.startswith(frozen)))
        optimizer = zb.ZeroOrder(model, lr, seed=9, **parts)
        zb.replay(optimizer, [record])
        return snapshot(model)

    dense = moved(partition=zb.whole)
    for cut in (zb.layers, zb.linears):
        part = moved(partition=cut, schedule=zb.Ascending())
        active = set(cut(Tiny())[0].params)
        for n in start:
            assert torch.equal(bits(part[n]), bits((dense if n in active else start)[n]))
    without = moved(frozen="embed", partition=zb.whole)
    for n in start:
        assert torch.equal(bits(without[n]), bits((start if n.startswith("embed") else dense)[n]))
    flat = normal(Draw(Key(9, 0)), (sum(p.numel() for p in start.values()),))
    if dtype == torch.float32:
        total = torch.cat([p.flatten() for p in start.values()])
        want = (total.double() - lr * coeff * flat.double()).float()
        torch.testing.assert_close(torch.cat([p.flatten() for p in dense.values()]), want, rtol=0, atol=1e-7)


def test_micro_batches_are_their_mean() -> None:
    a, b = torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5])

    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(tokens), tokens + 1)

    joint, split = Tiny(dtype=torch.float64), Tiny(dtype=torch.float64)
    together, apart = zb.mezo_bcd(joint, 1e-2), zb.mezo_bcd(split, 1e-2)
    for _ in range(20):
        together.step(lambda: loss(joint, torch.cat([a, b])))
        apart.step([lambda: loss(split, a), lambda: loss(split, b)])
    for n, p in split.named_parameters():
        torch.testing.assert_close(p, joint.get_parameter(n), rtol=1e-6, atol=1e-8)


def test_probes_are_averaged() -> None:
    """One step with two probes is the mean of the two single-probe steps."""
    start = snapshot(Tiny(dtype=torch.float64))
    model = Tiny(dtype=torch.float64)
    optimizer = zb.mezo(model, 0.1, probes=2)
    optimizer.step(next_token(model))
    c0, c1 = optimizer.record.coeffs
    assert c0 != c1
    for n, p in model.named_parameters():
        u0, u1 = (normal(Draw(Key(0, 0, k), optimizer.offsets[n]), p.shape).double() for k in (0, 1))
        torch.testing.assert_close(p.detach(), start[n] - 0.1 * (c0 * u0 + c1 * u1) / 2, rtol=0, atol=1e-12)


def test_one_sided_measures_from_the_middle() -> None:
    model = Tiny(dtype=torch.float64)
    optimizer = zb.ZeroOrder(model, 0.0, partition=zb.whole, estimator=zb.OneSided(eps=1e-4, probes=3))
    calls = []

    def loss() -> torch.Tensor:
        calls.append(float(next_token(model)()))
        return calls[-1]

    optimizer.step(loss)
    assert len(calls) == 4
    assert optimizer.record.loss == calls[0]
    two = zb.ZeroOrder(model, 0.0, partition=zb.whole, estimator=zb.TwoSided(eps=1e-4, probes=3))
    two.step(loss)
    for c, d in zip(optimizer.record.coeffs, two.record.coeffs, strict=True):
        assert c == pytest.approx(d, rel=0.05, abs=0.02)


def test_lozo_as_published_moves_along_another_u_when_v_is_drawn() -> None:
    """PROTOCOL's bug: the measured direction and the update agree except on the first step of a turn."""

    def aligned(as_published: bool) -> list[bool]:
        model = Tiny()
        optimizer = zb.lozo(model, 1e-3, rank=1, interval=3, as_published=as_published)
        out = []
        for _ in range(7):
            before = snapshot(model)
            name, param, basis = next(m for m in optimizer.members if isinstance(m.basis, Factored))
            optimizer.step(next_token(model))
            key, c = Key(0, optimizer.record.step), optimizer.record.coeffs[0]
            z = normal(Draw(key, basis.site.offset), (basis.shape[0], 1))
            step = -1e-3 * c * z @ basis.factor(torch.device("cpu")).T
            out.append(torch.allclose(param.detach() - before[name], step, atol=1e-6, rtol=1e-3))
        return out

    assert aligned(False) == [True] * 7
    assert aligned(True) == [False, True, True, False, True, True, False]


def test_momentum_is_carried_between_low_rank_bases() -> None:
    """On a refresh m becomes m VᵀV'/n, as in LOZO-M."""
    model = Tiny()
    optimizer = zb.lozo_m(model, 1e-3, rank=2, interval=2, beta=0.5)
    _, param, old = next(m for m in optimizer.members if isinstance(m.basis, Factored))
    for _ in range(2):
        optimizer.step(next_token(model))
    m = optimizer.state[param]["m"].clone().view(old.shape[0], 2)
    new = next(x.basis for x in optimizer.members if x.param is param)
    optimizer.step(next_token(model))
    v, w = old.factor(torch.device("cpu")), new.factor(torch.device("cpu"))
    assert not torch.equal(v, w)
    z = normal(Draw(Key(0, 2), new.site.offset), (new.shape[0], 2))
    want = 0.5 * (m @ v.T @ w / old.shape[1]) + 0.5 * optimizer.record.coeffs[0] * z
    torch.testing.assert_close(optimizer.state[param]["m"].view_as(want), want, rtol=1e-4, atol=1e-6)


def test_rademacher_directions() -> None:
    model = Tiny(dtype=torch.float64)
    start = snapshot(model)
    optimizer = zb.mezo_bcd(model, 1e-2, distribution=zb.Distribution.RADEMACHER)
    optimizer.step(next_token(model))
    size = 1e-2 * abs(optimizer.record.coeffs[0])
    for n in optimizer.blocks[optimizer.record.block].params:
        torch.testing.assert_close((model.get_parameter(n) - start[n]).abs(), torch.full_like(start[n], size))
