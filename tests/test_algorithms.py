"""Algorithms 1 to 5 of the paper, transcribed plainly; the library takes the same trajectories.

The transcription perturbs in place, restores by subtraction and keeps every
vector whole.  It shares with the library nothing but the function that gives
the noise of a seed; t counts from 1 and blocks from 1, as in the paper.
"""

from __future__ import annotations

import math

import pytest
import torch

import zeroblock as zb
from toy import Tiny, next_token, snapshot
from zeroblock.noise import SCHEDULE, Draw, Key
from zeroblock.ops import normal, uniform

STEPS = 60
SEED = 4


class Paper:
    """θ in blocks, and the subroutines of the pseudocode."""

    def __init__(self) -> None:
        self.model = Tiny(dtype=torch.float64).requires_grad_(False)
        self.loss = next_token(self.model)
        sizes = [(n, p.numel()) for n, p in self.model.named_parameters()]
        starts = {n: sum(size for _, size in sizes[:i]) for i, (n, _) in enumerate(sizes)}
        groups = [["embed."], *([f"layers.{i}."] for i in range(3)), ["norm."]]
        self.blocks = [
            [(p, starts[n]) for n, p in self.model.named_parameters() if n.startswith(tuple(prefixes))]
            for prefixes in groups
        ]
        self.N = len(self.blocks)

    def sample(self, j: int, s: int) -> list[torch.Tensor]:
        """u ~ N(0, I) of block j after the generator was reset with seed s."""
        return [normal(Draw(Key(SEED, s), start), p.shape).double() for p, start in self.blocks[j - 1]]

    def perturb_parameters(self, j: int, mu: float, s: int) -> None:  # Algorithm 2
        for (p, _), u in zip(self.blocks[j - 1], self.sample(j, s), strict=True):
            p.add_(mu * u)

    def projected_grad(self, j: int, mu: float, s: int) -> float:
        self.perturb_parameters(j, mu, s)
        plus = float(self.loss())
        self.perturb_parameters(j, -2 * mu, s)
        minus = float(self.loss())
        self.perturb_parameters(j, mu, s)
        return (plus - minus) / (2 * mu)

    def descend(self, j: int, eta: float, grad: float, s: int) -> None:
        for (p, _), u in zip(self.blocks[j - 1], self.sample(j, s), strict=True):
            p.sub_(eta * grad * u)

    def update_block_idx(self, order: str, t: int) -> int:  # Algorithm 3
        n = self.N
        if order == "ascending":
            return (t - 1) % n + 1
        if order == "descending":
            return n - (t - 1) % n
        if order == "flip-flop":
            return n - abs((t - 1) % (2 * n - 2) - (n - 1))
        # random: the text's full permutation a cycle (the pseudocode's first cycle is one step short)
        draws = uniform(Key(SEED, (t - 1) // n, stream=SCHEDULE), n)
        return sorted(range(1, n + 1), key=lambda i: draws[i - 1])[(t - 1) % n]


def assert_same_trajectory(paper: Paper, optimizer: zb.ZeroOrder, expected: list[tuple[int, float]]) -> None:
    model = optimizer.model
    got = []
    for _ in range(STEPS):
        optimizer.step(next_token(model))
        got.append((optimizer.record.block + 1, optimizer.record.coeffs[0]))
    assert [j for j, _ in got] == [j for j, _ in expected]
    for (_, c), (_, d) in zip(got, expected, strict=True):
        assert c == pytest.approx(d, rel=1e-4, abs=1e-6)
    moved = snapshot(Tiny(dtype=torch.float64))
    for n, p in paper.model.named_parameters():
        torch.testing.assert_close(model.get_parameter(n).detach(), p, rtol=1e-6, atol=1e-8)
        assert (p - moved[n]).abs().max() > 1e-3  # and they went somewhere


@pytest.mark.parametrize("order", ["ascending", "descending", "flip-flop", "random"])
def test_algorithm_1_mezo_bcd(order: str) -> None:
    paper, mu, eta, trace = Paper(), 1e-3, 2e-2, []
    for t in range(1, STEPS + 1):
        j, s = paper.update_block_idx(order, t), t - 1
        grad = paper.projected_grad(j, mu, s)
        paper.descend(j, eta, grad, s)
        trace.append((j, grad))
    from zeroblock.schedule import by_name

    model = Tiny(dtype=torch.float64)
    assert_same_trajectory(paper, zb.mezo_bcd(model, eta, mu, schedule=by_name(order), seed=SEED), trace)


@pytest.mark.parametrize("temperature", [1.0, 0.05])
def test_algorithm_4_adaptive_selection(temperature: float) -> None:
    paper, mu, eta, alpha, trace = Paper(), 1e-3, 1e-2, 0.1, []
    warm = 15
    z = [0.0] * (paper.N + 1)
    for t in range(1, STEPS + 1):
        s = t - 1
        if t <= warm:
            j = paper.update_block_idx("ascending", t)
        else:
            weights = [math.exp(z[i] / temperature) for i in range(1, paper.N + 1)]
            p = [w / sum(weights) for w in weights]
            draw, j, total = uniform(Key(SEED, t - 1, probe=1, stream=SCHEDULE), 1)[0], 1, p[0]
            while draw >= total and j < paper.N:
                j += 1
                total += p[j - 1]
        grad = paper.projected_grad(j, mu, s)
        z[j] = alpha * grad + (1 - alpha) * z[j]
        paper.descend(j, eta, grad, s)
        trace.append((j, grad))
    assert len({j for j, _ in trace[warm:]}) > 1
    schedule = zb.Adaptive(alpha, temperature, warmup=warm, signed=True, first=zb.Ascending())
    model = Tiny(dtype=torch.float64)
    optimizer = zb.mezo_bcd_adaptive(model, eta, mu, schedule=schedule, seed=SEED)
    assert_same_trajectory(paper, optimizer, trace)
    assert optimizer.scores == pytest.approx(z[1:], rel=1e-4)
    published = zb.mezo_bcd_adaptive(Tiny(), as_published=True).schedule
    assert (published.signed, published.first, published.warmup) == (True, zb.Ascending(), None)


def test_algorithm_5_adam() -> None:
    paper, mu, eta, nu = Paper(), 1e-3, 1e-2, 7
    b1, b2, epsilon = 0.9, 0.999, 1e-8
    trace = []
    for tb in range(1, math.ceil(STEPS / nu) + 1):
        j = paper.update_block_idx("random", tb)
        m = [torch.zeros_like(p) for p, _ in paper.blocks[j - 1]]
        v = [torch.zeros_like(p) for p, _ in paper.blocks[j - 1]]
        for t in range(1, nu + 1):
            s = nu * (tb - 1) + t - 1
            if s >= STEPS:
                break
            grad = paper.projected_grad(j, mu, s)
            for i, ((p, _), u) in enumerate(zip(paper.blocks[j - 1], paper.sample(j, s), strict=True)):
                g = grad * u
                m[i] = b1 * m[i] + (1 - b1) * g
                v[i] = b2 * v[i] + (1 - b2) * g * g
                p.sub_(eta * (m[i] / (1 - b1**t)) / ((v[i] / (1 - b2**t)).sqrt() + epsilon))
            trace.append((j, grad))
    model = Tiny(dtype=torch.float64)
    optimizer = zb.mezo_bcd_adam(model, eta, mu, interval=nu, seed=SEED)
    got = []
    for _ in range(STEPS):
        optimizer.step(next_token(model))
        got.append((optimizer.record.block + 1, optimizer.record.coeffs[0]))
    assert [j for j, _ in got] == [j for j, _ in trace]
    for n, p in paper.model.named_parameters():  # Adam's moments are fp32 in the library
        torch.testing.assert_close(model.get_parameter(n).detach(), p, rtol=1e-3, atol=2e-4)
