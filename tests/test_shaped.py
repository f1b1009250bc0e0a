"""HiZOO, ConMeZO, SubZero and ZO-Muon against plain transcriptions of what was published.

A transcription walks the weights in place, in double precision, and shares with the library nothing but the noise of
an address.  Without blocks it is the paper's; with blocks, which no paper has, each turn takes the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zeroblock as zb
from toy import Tiny, next_token, same, snapshot
from zeroblock.basis.framed import TALL, orthonormal
from zeroblock.noise import BASIS, Draw, Key
from zeroblock.ops import normal
from zeroblock.rule.muon import orthogonalised

SEED, STEPS, MU = 4, 24, 1e-3
CUTS: dict[str, dict[str, Any]] = {
    "whole": {"partition": zb.whole},
    "layers": {"partition": zb.layers, "schedule": zb.Ascending()},
}
every_cut = pytest.mark.parametrize("cut", CUTS)


def closure(model: nn.Module) -> Callable[[], Tensor]:
    """Cross-entropy in the model's own precision: second differences of single precision would be noise."""
    tokens = torch.arange(7)
    return lambda: nn.functional.cross_entropy(model(tokens), tokens.roll(-1))


class Published:
    """θ in blocks, the noise of a step, and the walk that every published code takes."""

    def __init__(self, cut: str) -> None:
        self.model = Tiny(dtype=torch.float64).requires_grad_(False)
        self.loss = closure(self.model)
        sizes = {name: p.numel() for name, p in self.model.named_parameters()}
        starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
        groups = [""] if cut == "whole" else ["embed.", "layers.0.", "layers.1.", "layers.2.", "norm."]
        self.blocks = [
            [(p, starts[name]) for name, p in self.model.named_parameters() if name.startswith(group)]
            for group in groups
        ]

    def steps(self, interval: int = 1) -> Iterator[tuple[int, list[tuple[Tensor, int]]]]:
        for step in range(STEPS):
            yield step, self.blocks[step // interval % len(self.blocks)]

    @staticmethod
    def noise(start: int, shape: Any, step: int, probe: int = 0, stream: int = 0) -> Tensor:
        return normal(Draw(Key(SEED, step, probe, stream), start), tuple(shape)).double()

    def at(self, block: list[tuple[Tensor, int]], directions: list[Tensor], scale: float) -> float:
        """The loss at θ + scale·direction, walked to and back."""
        for sign in (1, -1):
            for (p, _), direction in zip(block, directions, strict=True):
                p.add_(sign * scale * direction)
            if sign == 1:
                loss = float(self.loss())
        return loss

    def slope(self, block: list[tuple[Tensor, int]], directions: list[Tensor]) -> float:
        return (self.at(block, directions, MU) - self.at(block, directions, -MU)) / (2 * MU)


def frame(start: int, rows: int, rank: int, step: int, probe: int) -> Tensor:
    """Q of a QR decomposition, with a positive diagonal of R."""
    q, r = np.linalg.qr(Published.noise(start, (rows, rank), step, probe, BASIS).numpy())
    return torch.from_numpy(q * np.sign(np.diag(r)))


def assert_same(paper: Published, build: Callable[..., zb.ZeroOrder], cut: str, **options: Any) -> None:
    model = Tiny(dtype=torch.float64)
    optimizer = build(model, eps=MU, seed=SEED, **CUTS[cut], **options)
    for _ in range(STEPS):
        optimizer.step(closure(model))
    start = snapshot(Tiny(dtype=torch.float64))
    for name, p in paper.model.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).detach(), p, rtol=1e-5, atol=1e-6)
        if p.dim() > 1:
            assert (p - start[name]).abs().max() > 1e-3  # it went somewhere


@every_cut
@pytest.mark.parametrize("as_published", [False, True], ids=["paper", "code"])
def test_hizoo(cut: str, as_published: bool) -> None:
    paper, eta, alpha = Published(cut), 1e-2, 0.02
    scale = {start: torch.ones_like(p) for block in paper.blocks for p, start in block}  # Σ
    seen = []
    for step, block in paper.steps():
        u = [paper.noise(start, p.shape, step) for p, start in block]
        directions = [scale[start].sqrt() * z for (_, start), z in zip(block, u, strict=True)]
        here, plus, minus = (paper.at(block, directions, mu) for mu in (0.0, MU, -MU))
        for (p, start), z in zip(block, u, strict=True):
            sigma = scale[start]
            estimate = abs(plus + minus - 2 * here) / (2 * MU**2) * z * z / sigma
            if as_published:  # "Hessian_matrix", of which the code takes the root in the place of Σ's
                scale[start] = (1 - alpha) * sigma + alpha * estimate
            else:  # Σ⁻¹ ← (1 - α)·Σ⁻¹ + α·|diag Σ'|
                scale[start] = 1 / ((1 - alpha) / sigma + alpha * estimate)
            p.sub_(eta * (plus - minus) / (2 * MU) * scale[start].sqrt() * z)
        seen.append(max(float((scale[start] - 1).abs().max()) for _, start in block))
    assert max(seen) > 0.1  # the curvature mattered
    assert_same(paper, zb.hizoo, cut, lr=eta, alpha=alpha, as_published=as_published)


@every_cut
def test_conmezo(cut: str) -> None:
    paper, eta, theta, beta = Published(cut), 1e-2, 1.1, 0.8
    momentum = {start: torch.zeros_like(p) for block in paper.blocks for p, start in block}
    for step, block in paper.steps():
        u = [paper.noise(start, p.shape, step) for p, start in block]
        norm = math.sqrt(sum(float(momentum[start].square().sum()) for _, start in block))
        if norm > 0:
            d = sum(p.numel() for p, _ in block)
            m = [momentum[start] / norm for _, start in block]
            u = [math.sqrt(d) * math.cos(theta) * a + math.sin(theta) * b for a, b in zip(m, u, strict=True)]
        c = paper.slope(block, u)
        for (p, start), z in zip(block, u, strict=True):
            p.sub_(eta * c * z)
            momentum[start] = beta * momentum[start] + (1 - beta) * c * z
    assert_same(paper, zb.conmezo, cut, lr=eta, theta=theta, beta=beta)


@every_cut
@pytest.mark.parametrize("scaled", [True, False], ids=["code", "paper"])
def test_subzero(cut: str, scaled: bool) -> None:
    paper, eta, rank, interval = Published(cut), 1e-2 if scaled else 1e-1, 3, 5
    for step, block in paper.steps(interval):
        u = []
        for p, start in block:
            if p.dim() < 2:
                u.append(paper.noise(start, p.shape, step))
                continue
            m, n = p.shape
            left, right = (frame(start, rows, rank, step // interval * interval, k) for rows, k in ((m, 1), (n, 0)))
            factor = math.sqrt(m * n) / rank if scaled else 1.0
            u.append(factor * left @ paper.noise(start, (rank, rank), step) @ right.T)
        c = paper.slope(block, u)
        for (p, _), z in zip(block, u, strict=True):
            p.sub_(eta * c * z)
    assert_same(paper, zb.subzero, cut, lr=eta, rank=rank, interval=interval, scaled=scaled)


def msign(g: Tensor) -> Tensor:
    """Newton-Schulz as the code of ZO-Muon has it from Muon."""
    x = g.mT if g.shape[0] > g.shape[1] else g
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if g.shape[0] > g.shape[1] else x


@every_cut
def test_zo_muon(cut: str) -> None:
    paper, eta, rank, interval, queries = Published(cut), 1e-2, 3, 5, 3
    for step, block in paper.steps(interval):
        z = [
            [paper.noise(start, (rank, p.shape[1]) if p.dim() > 1 else p.shape, step, q) for p, start in block]
            for q in range(queries)
        ]
        frames = [frame(s, len(p), rank, step // interval * interval, 1) if p.dim() > 1 else None for p, s in block]
        lifted = [[a if f is None else f @ a for f, a in zip(frames, one, strict=True)] for one in z]
        base = float(paper.loss())
        c = [(paper.at(block, one, MU) - base) / MU for one in lifted]
        for i, ((p, _), f) in enumerate(zip(block, frames, strict=True)):
            g = sum(c[q] * z[q][i] for q in range(queries)) / queries
            p.sub_(eta * 1e-5 * g if f is None else eta * f @ msign(g))
    assert_same(paper, zb.zo_muon, cut, lr=eta, rank=rank, interval=interval, probes=queries)


def test_orthogonalised_keeps_the_singular_vectors() -> None:
    g = normal(Draw(Key(0, 0)), (9, 4))
    values = torch.linalg.svdvals(orthogonalised(g, 5))
    assert ((values > 0.6) & (values < 1.3)).all()
    u, _, v = torch.linalg.svd(g, full_matrices=False)
    middle = u.T @ orthogonalised(g, 5) @ v.T
    torch.testing.assert_close(middle, middle.diagonal().diag(), atol=1e-5, rtol=0)
    assert not orthogonalised(torch.zeros(2, 3), 5).any()


BUILDS: dict[str, Callable[..., zb.ZeroOrder]] = {
    "hizoo": lambda model, **o: zb.hizoo(model, 2e-2, alpha=1e-3, **o),
    "hizoo as published": lambda model, **o: zb.hizoo(model, 2e-2, alpha=1e-4, as_published=True, **o),
    "conmezo": lambda model, **o: zb.conmezo(model, 2e-2, **o),
    "subzero": lambda model, **o: zb.subzero(model, 2e-2, rank=3, interval=6, **o),
    "zo_muon": lambda model, **o: zb.zo_muon(model, 4e-2, rank=3, interval=6, **o),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BUILDS)
def test_blocks_descend_and_replay(name: str, dtype: torch.dtype) -> None:
    """A small language model in blocks: the loss falls, and the records alone give the weights, bit for bit."""
    model, records = Tiny(dtype=dtype), []
    optimizer, loss = BUILDS[name](model, partition=zb.layers, eps=1e-2), next_token(model)
    before = loss().item()
    for _ in range(60):
        optimizer.step(loss)
        records.append(optimizer.record)
    assert loss().item() < before - 0.1
    again = Tiny(dtype=dtype)
    zb.replay(BUILDS[name](again, partition=zb.layers, eps=1e-2), records)
    assert same(snapshot(again), snapshot(model))


def test_one_block_has_a_state_at_a_time() -> None:
    model = Tiny()
    optimizer = zb.hizoo(model, 1e-3, alpha=0.01, partition=zb.layers, interval=3, reset=True)
    for _ in range(10):
        block = optimizer.blocks[optimizer.block]
        optimizer.step(closure(model))
        kept = set(optimizer.state_dict()["state"])
        assert kept <= set(block.params)


def test_beta_rises_as_in_the_code_of_conmezo() -> None:
    rule = zb.Cone(warmup=2000, beta=0.95)
    p = ((1100 - 200) / 1800) ** 1.8
    assert [rule.beta_at(t) for t in (1, 201)] == pytest.approx([0.1, 0.1])
    assert rule.beta_at(1101) == pytest.approx(0.95 - 0.85 / (1 + 8 * p) ** 3)
    assert rule.beta_at(2002) == 0.95
    assert zb.Cone().beta_at(1) == 0.95


def test_folded_frames_move_as_far() -> None:
    """Steps that are held in r×r coordinates end where written ones do, and measure the same."""
    models = [Tiny() for _ in range(2)]
    runs = [zb.subzero(model, 1e-2, rank=3, interval=8, fold=f) for model, f in zip(models, (1, 8), strict=True)]
    for _ in range(16):
        losses = [float(run.step(closure(model))) for run, model in zip(runs, models, strict=True)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    for name, weight in snapshot(models[0]).items():
        torch.testing.assert_close(models[1].get_parameter(name).detach(), weight, rtol=0, atol=1e-4)


def test_what_cannot_work_is_refused() -> None:
    model = Tiny()
    with pytest.raises(zb.ZeroBlockError, match=r"give estimator=zb.Curvature"):
        zb.ZeroOrder(model, 1e-2, rule=zb.Hessian()).step(closure(model))
    assert same(snapshot(model), snapshot(Tiny()))
    optimizer = zb.lozo(model, 1e-2, rule=zb.Cone(), fold=2)
    optimizer.step(closure(model))
    with pytest.raises(zb.ZeroBlockError, match="leave fold out"):
        optimizer.step(closure(model))
    for build in (
        lambda: zb.Hessian(-1.0),
        lambda: zb.Cone(theta=2.0),
        lambda: zb.Cone(beta=1.0),
        lambda: zb.Cone(warmup=-1),
        lambda: zb.Muon(iterations=0),
        lambda: zb.Frames(0),
    ):
        with pytest.raises(zb.ZeroBlockError, match="must"):
            build()


def test_a_forward_pass_in_autocast_measures_in_single_precision() -> None:
    """The product of a frame is made while the model runs, which may be in autocast."""
    losses = []
    for context in (torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False)):
        model = Tiny()
        optimizer = zb.zo_muon(model, 1e-2, rank=3, probes=1)
        copies = []

        def objective(model: nn.Module = model, copies: list[Tensor] = copies) -> float:
            copies.append(nn.functional.embedding(torch.arange(7), model.embed.weight).detach().clone())
            return float(len(copies))

        with context:
            optimizer.step(objective)
        losses.append(copies)
    assert torch.equal(losses[0][1], losses[1][1])
    assert not torch.equal(losses[0][0], losses[0][1])


@pytest.mark.parametrize("method", ["hizoo", "conmezo"])
def test_the_size_of_pieces_changes_no_bit(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU shapes larger pieces than the CPU does, and their journals rebuild the same weights."""
    ends = []
    for least in (9, 1 << 19):  # pieces of 35 weights, which end within a word of the noise; all at once
        monkeypatch.setattr("zeroblock.basis.shaped.LEAST", least)
        torch.manual_seed(0)
        model = torch.nn.Linear(33, 17).bfloat16()
        x = torch.ones(3, 33, dtype=torch.bfloat16)
        optimizer = zb.METHODS[method](model, lr=1e-2, eps=1e-2)
        records = []
        optimizer.listener = records.append
        for _ in range(5):
            optimizer.step(lambda model=model, x=x: model(x).float().square().mean())
        ends.append((records, [p.detach().clone() for p in model.parameters()]))
    assert ends[0][0] == ends[1][0]
    assert all(map(torch.equal, ends[0][1], ends[1][1]))


@pytest.mark.parametrize("shape", [(4096, 64), (TALL * 16, 16), (TALL * 16 - 1, 16), (9, 9), (50, 1), (1, 1)])
def test_frames_are_those_of_a_qr_decomposition(shape: tuple[int, int]) -> None:
    noise = normal(Draw(Key(3, 0)), shape).double()
    q, r = np.linalg.qr(noise.numpy())
    frame = orthonormal(noise)
    assert torch.equal(frame.float(), torch.from_numpy(q * np.sign(np.diag(r))).float())
    assert torch.allclose(frame.T @ frame, torch.eye(shape[1], dtype=torch.float64), atol=1e-13)
