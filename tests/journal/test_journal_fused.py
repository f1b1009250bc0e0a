"""The fused replay is the replay step by step: same weights to the bit, same state of the optimizer."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import zeroblock as zb
from toy import DTYPES, Tiny, next_token, same, snapshot
from zeroblock import fused
from zeroblock.journal import Record, replay
from zeroblock.noise import Distribution, Rounding

CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "full": (
        torch.bfloat16,
        {"weight_decay": 0.1, "interval": 2, "schedule": zb.Adaptive(warmup=2), "seed": 2**63 + 5, "clip": 0.05},
    ),
    "sparse, two probes": (torch.float32, {"subspace": zb.Sparse(0.6), "estimator": zb.TwoSided(1e-3, 2), "clip": 0.1}),
    "Bernoulli, signs, to nearest": (
        torch.float16,
        {
            "subspace": zb.Bernoulli(0.5),
            "interval": 3,
            "distribution": Distribution.RADEMACHER,
            "rounding": Rounding.NEAREST,
        },
    ),
}


for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
    CASES[f"low rank, {dtype}"] = (
        dtype,
        {"subspace": zb.LowRank(3), "weight_decay": 0.1, "interval": 2, "estimator": zb.TwoSided(1e-3, 2)},
    )
CASES["rank one, signs, to nearest"] = (
    torch.bfloat16,
    {"subspace": zb.LowRank(1), "distribution": Distribution.RADEMACHER, "rounding": Rounding.NEAREST},
)
CASES["in units of the weights, two probes"] = (
    torch.bfloat16,
    {"subspace": zb.Relative(), "rule": zb.Normalized(), "estimator": zb.TwoSided(0.04, 2), "clip": 0.1},
)
CASES["low rank, in units of the weights"] = (
    torch.float32,
    {"subspace": zb.Relative(zb.LowRank(2)), "rule": zb.Normalized(), "interval": 2},
)


class Odd(nn.Module):
    """Tensors that begin within a group of eight, and one of several tiles."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.a = nn.Parameter(torch.randn(13, generator=generator).to(dtype))
        self.b = nn.Parameter(torch.randn(50, 101, generator=generator).to(dtype))
        self.c = nn.Parameter(torch.randn(1, generator=generator).to(dtype))

    def loss(self) -> torch.Tensor:
        return sum(p.double().square().mean() for p in self.parameters())


def run(optimizer: zb.ZeroOrder, loss: Any, steps: int) -> list[Record]:
    records = []
    for _ in range(steps):
        optimizer.step(loss)
        records.append(optimizer.record)
    return records


def state(optimizer: zb.ZeroOrder) -> dict[str, Any]:
    return {key: value for key, value in optimizer.state_dict().items() if key != "param_groups"}


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have ``replay`` take steps together without a GPU, where Triton's interpreter runs the kernels; their numbers."""
    taken, advance = [], fused.advance

    def counted(optimizer: zb.ZeroOrder, visits: dict[int, list[Record]], report: Any) -> None:
        taken.append(sum(map(len, visits.values())))
        advance(optimizer, visits, report)

    monkeypatch.setattr(fused, "serves", lambda optimizer: True)
    monkeypatch.setattr(fused, "advance", counted)
    return taken


@pytest.mark.parametrize("case", CASES)
def test_all_steps_at_once_are_the_steps_one_by_one(case: str, together: list[int]) -> None:
    dtype, options = CASES[case]
    build = functools.partial(zb.ZeroOrder, lr=1e-2, partition=zb.layers, **options)
    model, again = Tiny(dtype=dtype), Tiny(dtype=dtype)
    optimizer, other = build(model), build(again)
    records = run(optimizer, next_token(model), 6)
    seen: list[float] = []
    replay(other, records, seen.append)
    assert together == [6]
    assert same(snapshot(again), snapshot(model))
    assert not same(snapshot(again), snapshot(Tiny(dtype=dtype)))
    assert state(other) == state(optimizer)
    assert other.record == records[-1]
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1)
    # and it can go on
    optimizer.step(next_token(model))
    other.step(next_token(again))
    assert other.record == optimizer.record
    assert same(snapshot(again), snapshot(model))


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("subspace", [zb.Full(), zb.LowRank(2)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_tensor_may_begin_anywhere(dtype: torch.dtype, subspace: Any) -> None:
    model, again = Odd(dtype), Odd(dtype)
    build = functools.partial(zb.ZeroOrder, lr=1e-2, partition=zb.whole, subspace=subspace)
    records = run(build(model), model.loss, 2)
    replay(build(again), records)
    assert same(snapshot(again), snapshot(model))


@pytest.mark.usefixtures("together")
def test_steps_whose_coordinates_do_not_fit_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns are cut too: the second part begins in the middle of one."""
    model, again = Odd(torch.float16), Odd(torch.float16)
    build = functools.partial(zb.lozo, lr=1e-2, interval=3)
    records = run(build(model), model.loss, 8)
    monkeypatch.setattr(fused, "MAX_COORDINATES", 4 * 2 * 101)
    replay(build(again), records)
    assert same(snapshot(again), snapshot(model))


def test_as_published_goes_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert fused.serves(zb.lozo(Tiny(), 0.1))
    assert not fused.serves(zb.lozo(Tiny(), 0.1, as_published=True))


@pytest.mark.usefixtures("together")
def test_records_of_another_run_move_nothing() -> None:
    model, again = Tiny(), Tiny()
    records = run(zb.mezo_bcd(model, 1e-2), next_token(model), 5)
    with pytest.raises(zb.ZeroBlockError, match="another method, seed or order"):
        replay(zb.mezo_bcd(again, 1e-2, seed=8), records)
    assert same(snapshot(again), snapshot(Tiny()))


@pytest.mark.usefixtures("together")
def test_a_step_of_zero_changes_not_even_a_zero() -> None:
    model = Odd(torch.float32)
    model.a.data.fill_(-0.0)
    before = snapshot(model)
    replay(zb.mezo(model, 0.1), [Record(0, 0, (1.0,), 0.0, (), 1.0)])
    assert same(snapshot(model), before)


def test_the_cpu_and_other_rules_go_step_by_step() -> None:
    assert not fused.serves(zb.mezo(Tiny(), 0.1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("name", zb.METHODS)
def test_a_journal_of_the_gpu_gives_the_gpus_weights(name: str, dtype: torch.dtype) -> None:
    model, again = Tiny(dtype=dtype).cuda(), Tiny(dtype=dtype).cuda()
    build = functools.partial(zb.METHODS[name], lr=1e-2, weight_decay=0.01, probes=2, clip=0.5)
    optimizer, other = build(model), build(again)
    records = run(optimizer, next_token(model), 20)
    records.append(Record(20, optimizer.block, (float("nan"),) * len(records[0].coeffs), 1e-2, (), 1.0))
    served = isinstance(other.rule, zb.SGD) and not isinstance(other.subspace, (zb.Outer, zb.Frames))
    assert fused.serves(other) == served
    replay(other, records[:20])
    assert same(snapshot(again), snapshot(model))
    with pytest.warns(zb.ZeroBlockWarning):
        replay(other, records[20:])
    assert same(snapshot(again), snapshot(model))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("subspace", [zb.Full(), zb.LowRank(2), zb.Sparse(0.5), zb.Bernoulli(0.5)], ids=repr)
def test_large_tensors_on_the_gpu(subspace: Any, dtype: torch.dtype) -> None:
    """Many tiles, odd offsets, thousands of steps; the step-by-step replay on the CPU is the judge."""
    here, there = (nn.Sequential(nn.Linear(301, 300), nn.LayerNorm(300), nn.Linear(300, 7)).to(dtype) for _ in "ab")
    there.load_state_dict(here.state_dict())
    there.cuda()
    build = functools.partial(zb.mezo, lr=1e-3, subspace=subspace, interval=3, weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)
    coeffs = torch.randn(1000, generator=generator).tolist()
    records = [Record(t, 0, (c,), 1e-3 / (t + 1), (), 1.0) for t, c in enumerate(coeffs)]
    replay(build(here), records)
    replay(build(there), records)
    assert same(snapshot(here), snapshot(there))
