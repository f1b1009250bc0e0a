"""Theorem 3.10 and Lemmas 3.9, C.2 against runs: data sets that differ in one example, with the same noise and order.

    ℓ(θ; x, y) = σ(-y·xᵀθ),  ‖x‖ = 1

lies in (0, 1), is 1/4-Lipschitz and 1/(6√3)-smooth, and its Hessian has rank one, so that ρ = ‖Mx‖² ≤ 1.

The two runs are equal until the example that differs is drawn.  For n = 200 this rarely happens early, but an early
draw matters most (α_t = C/t).  So the step of the first draw is itself drawn from q(k) ∝ p(k)/k, where
p(k) = (1 - 1/n)^(k-1)/n is its law, and a pair counts with weight p/q.  The expectation is the same, and 400 pairs give
the error (6 %) of 4,000 plain ones.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from pandas import DataFrame
from torch import Tensor, nn

from ..errors import ZeroBlockError
from .batched import haar
from .bounds import Stability

LIPSCHITZ = 1 / 4
SMOOTHNESS = 1 / (6 * math.sqrt(3))
FRESH = 300
"""Number of fresh examples on which the two runs are compared, next to the data."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Dimension, subspace, number of examples, steps, and C of α_t = C/t."""

    dim: int = 64
    s: int = 16
    examples: int = 200
    steps: int = 3000
    rate: float = 1.0
    eps: float = 1e-2

    def __post_init__(self) -> None:
        if self.steps < 10:
            raise ZeroBlockError(f"stability is measured over at least 10 steps, got {self.steps}")

    @property
    def theorem(self) -> Stability:
        """The bound for this setting."""
        return Stability(SMOOTHNESS, LIPSCHITZ, self.s, 1.0, self.examples, self.rate)

    @property
    def checkpoints(self) -> list[int]:
        """Values of T at which the runs are compared, about two per factor of ten."""
        return [int(t) for t in np.unique(np.geomspace(10, self.steps, 6).round().astype(int))]


def examples(count: int, dim: int, seed: int) -> Tensor:
    """y·x of unit length, (count, dim); the labels correlate with the first coordinate of x."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, dim, dtype=torch.float64, generator=generator)
    x[:, 0] = x[:, 0].abs() + 0.5
    return nn.functional.normalize(x, dim=1)


def coefficient(theta: Tensor, signed: Tensor, v: Tensor, eps: float) -> Tensor:
    """(ℓ(θ+εv) - ℓ(θ-εv))/2ε for one example and direction per row, (n,)."""
    margin, shift = (signed * theta).sum(1), eps * (signed * v).sum(1)
    return (torch.sigmoid(-margin - shift) - torch.sigmoid(-margin + shift)) / (2 * eps)


def first_draws(setting: Setting, pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The step at which each pair first draws the example that differs, and the pair's weight, (pairs,) each."""
    step = torch.arange(1, setting.steps + 1, dtype=torch.float64)
    p = (1 - 1 / setting.examples) ** (step - 1) / setting.examples
    q = p / step
    q /= q.sum()
    index = torch.multinomial(q, pairs, replacement=True, generator=generator)
    return step[index], p[index] / q[index]


def apart(setting: Setting, pairs: int, seed: int = 0) -> DataFrame:
    """Neighbouring runs: the largest over z of E|ℓ(θ_T; z) - ℓ(θ'_T; z)|, and E‖θ_T - θ'_T‖, with standard errors.

    The data sets are fixed; the expectation is over the algorithm's randomness.  z ranges over the data and FRESH
    examples.  ``slope`` is d log / d log T between this checkpoint and the one before, with a jackknife error.
    """
    generator = torch.Generator().manual_seed(seed)
    data = examples(setting.examples, setting.dim, seed=7)
    probe = torch.cat([data, -data[:1], examples(FRESH, setting.dim, seed=8)])
    first, weight = first_draws(setting, pairs, generator)
    one = torch.zeros(pairs, setting.dim, dtype=torch.float64)
    two = one.clone()
    rows: list[dict[str, float]] = []
    before: Tensor | None = None
    for t in range(1, setting.steps + 1):
        index = torch.randint(setting.examples, (pairs,), generator=generator)
        other = 1 + torch.randint(setting.examples - 1, (pairs,), generator=generator)
        index = torch.where(first == t, 0, torch.where(first > t, other, index))
        row = data[index]
        flipped = row * torch.where(index == 0, -1.0, 1.0).unsqueeze(1)  # the same point with the other label
        v = haar(pairs, setting.dim, setting.s, generator)
        lr = setting.rate / t
        one = one - lr * coefficient(one, row, v, setting.eps).unsqueeze(1) * v
        two = two - lr * coefficient(two, flipped, v, setting.eps).unsqueeze(1) * v
        if t not in setting.checkpoints:
            continue
        difference = (torch.sigmoid(-(probe @ one.T)) - torch.sigmoid(-(probe @ two.T))).abs() * weight
        worst = difference[int(difference.mean(1).argmax())]
        distance = (one - two).norm(dim=1) * weight
        slope, slope_error = math.nan, math.nan
        if before is not None:
            slope, slope_error = _slope(before, worst, math.log(t / rows[-1]["T"]))
        before = worst
        rows.append(
            {
                "s": setting.s, "C": setting.rate, "T": t, "n": setting.examples, "pairs": pairs,
                "q": setting.theorem.q, "measured": float(worst.mean()),
                "error": float(worst.std() / math.sqrt(pairs)), "distance": float(distance.mean()),
                "distance_error": float(distance.std() / math.sqrt(pairs)), "slope": slope,
                "slope_error": slope_error, "bound": setting.theorem.bound(t, setting.eps),
            }
        )  # fmt: skip
    return DataFrame(rows)


def _slope(before: Tensor, after: Tensor, width: float) -> tuple[float, float]:
    """(log E[after] - log E[before])/width over pairs, and its jackknife error."""
    n = len(before)
    left_out = ((after.sum() - after) / (before.sum() - before)).log() / width
    error = math.sqrt((n - 1) / n * float((left_out - left_out.mean()).square().sum()))
    return float((after.sum() / before.sum()).log()) / width, error


def recursion(setting: Setting, pairs: int, steps: int = 60, seed: int = 0) -> tuple[float, float]:
    """Lemma C.2: the largest ratio of E δ_{t+1} to its bound from E δ_t, and that ratio's standard error.

        E δ_{t+1} ≤ (1 + α_t L√s)E δ_t + α_t √(3s)·μL(ρmax + s·e^(-s/2)) + 4α_t G√s/n

    Runs with the same noise start at a distance of 0 and of 1, so that each of the first two terms dominates once.
    """
    generator = torch.Generator().manual_seed(seed)
    s, n = setting.s, setting.examples
    data = examples(n, setting.dim, seed=7)
    smoothing = math.sqrt(3 * s) * setting.eps * SMOOTHNESS * (1 + s * math.exp(-s / 2))
    best = (0.0, 0.0)
    for distance in (0.0, 1.0):
        one = torch.zeros(pairs, setting.dim, dtype=torch.float64)
        shift = torch.randn(pairs, setting.dim, dtype=torch.float64, generator=generator)
        two = one + distance * nn.functional.normalize(shift, dim=1)
        for t in range(1, steps + 1):
            lr = setting.rate / t
            v = haar(pairs, setting.dim, s, generator)
            index = torch.randint(n, (pairs,), generator=generator)
            flipped = data[index] * torch.where(index == 0, -1.0, 1.0).unsqueeze(1)
            before = float((one - two).norm(dim=1).mean())
            bound = (1 + lr * SMOOTHNESS * math.sqrt(s)) * before + lr * (smoothing + 4 * LIPSCHITZ * math.sqrt(s) / n)
            one = one - lr * coefficient(one, data[index], v, setting.eps).unsqueeze(1) * v
            two = two - lr * coefficient(two, flipped, v, setting.eps).unsqueeze(1) * v
            now = (one - two).norm(dim=1)
            best = max(best, (float(now.mean()) / bound, float(now.std()) / math.sqrt(pairs) / bound))
    return best


def generalization(setting: Setting, sets: int, seed: int = 0) -> tuple[float, float]:
    """ε_gen = E[R(θ_T) - R_S(θ_T)] and its standard error, over ``sets`` data sets S, one run each.

    R is estimated on as many fresh examples as S has, drawn anew for each S, so that the difference has mean ε_gen.
    """
    generator = torch.Generator().manual_seed(seed)
    n, d = setting.examples, setting.dim
    data = examples(sets * n, d, seed=1000 + seed).view(sets, n, d)
    fresh = examples(sets * n, d, seed=2000 + seed).view(sets, n, d)
    theta = torch.zeros(sets, d, dtype=torch.float64)
    every = torch.arange(sets)
    for t in range(1, setting.steps + 1):
        row = data[every, torch.randint(n, (sets,), generator=generator)]
        v = haar(sets, d, setting.s, generator)
        theta = theta - setting.rate / t * coefficient(theta, row, v, setting.eps).unsqueeze(1) * v
    risk = [torch.sigmoid(-(x @ theta.unsqueeze(2))).squeeze(2).mean(1) for x in (fresh, data)]
    gap = risk[0] - risk[1]
    return float(gap.mean()), float(gap.std() / math.sqrt(sets))
