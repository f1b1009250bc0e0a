"""Theorem 3.10 against runs: two data sets that differ in one example, the same noise, the same order.

    ℓ(θ; x, y) = σ(-y·xᵀθ),  ‖x‖ = 1

lies in (0, 1), is 1/4-Lipschitz and 1/(6√3)-smooth, and its Hessian has rank one, so that ρ = ‖Mx‖² ≤ 1.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import torch
from pandas import DataFrame
from torch import Tensor, nn

from ..block import whole
from ..errors import ZeroBlockError
from ..estimator import TwoSided
from ..optimizer import ZeroOrder
from ..schedule import Ascending
from .bounds import Stability
from .projection import Haar

LIPSCHITZ = 1 / 4
SMOOTHNESS = 1 / (6 * math.sqrt(3))


@dataclasses.dataclass(frozen=True)
class Setting:
    """Dimension, subspace, examples, steps, and C of α_t = C/t."""

    dim: int = 64
    s: int = 16
    examples: int = 200
    steps: int = 300
    rate: float = 1.0
    eps: float = 1e-2

    @property
    def theorem(self) -> Stability:
        """The bound that applies."""
        return Stability(SMOOTHNESS, LIPSCHITZ, self.s, 1.0, self.examples, self.rate)


class Sigmoid(nn.Module):
    """ℓ of signed examples y·x, (n, d)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(dim, dtype=torch.float64))

    def forward(self, signed: Tensor) -> Tensor:
        return torch.sigmoid(-(signed @ self.theta))


def examples(count: int, dim: int, seed: int) -> Tensor:
    """y·x of unit length whose labels lean on one direction, (count, dim)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, dim, dtype=torch.float64, generator=generator)
    x[:, 0] = x[:, 0].abs() + 0.5
    return nn.functional.normalize(x, dim=1)


def _train(data: Tensor, order: Tensor, setting: Setting, seed: int, at: list[int]) -> dict[int, Tensor]:
    model = Sigmoid(setting.dim)
    optimizer = ZeroOrder(
        model,
        setting.rate,
        partition=whole,
        schedule=Ascending(),
        subspace=Haar(setting.s),
        estimator=TwoSided(setting.eps),
        seed=seed,
    )
    seen = {}
    for t in range(1, setting.steps + 1):
        optimizer.param_groups[0]["lr"] = setting.rate / t
        row = data[order[t - 1]]
        optimizer.step(functools.partial(model, row))
        if t in at:
            seen[t] = model.theta.detach().clone()
    return seen


def pair(setting: Setting, seed: int, points: int = 12) -> DataFrame:
    """|ℓ(θ_T; z) - ℓ(θ'_T; z)| of one pair of runs, for z in the data and 500 fresh examples.

    The data sets are the same for every seed, which is the algorithm's randomness alone: stability is the largest
    over z of the mean over seeds.
    """
    if setting.steps < 10:
        raise ZeroBlockError(f"a pair of runs wants at least 10 steps, got {setting.steps}")
    first = examples(setting.examples, setting.dim, seed=7)
    second = first.clone()
    second[0] = -first[0]  # the same point with the other label: as different as an example can be
    order = torch.randint(setting.examples, (setting.steps,), generator=torch.Generator().manual_seed(10_000 + seed))
    at = [int(t) for t in np.unique(np.geomspace(10, setting.steps, points).astype(int))]
    one, two = (_train(data, order, setting, seed, at) for data in (first, second))
    probe = torch.cat([first, second[:1], examples(500, setting.dim, seed=8)])
    rows = []
    for t in at:
        apart = (torch.sigmoid(-(probe @ one[t])) - torch.sigmoid(-(probe @ two[t]))).abs()
        rows += [{"s": setting.s, "seed": seed, "T": t, "z": z, "apart": float(v)} for z, v in enumerate(apart)]
    return DataFrame(rows)


def summarise(frames: DataFrame, setting: Setting) -> DataFrame:
    """Largest over z of the mean over seeds, its standard error, and the theorem's bound, at each T."""
    rows = []
    for t, part in frames.groupby("T"):
        table = part.pivot(index="seed", columns="z", values="apart")
        worst = table.mean().idxmax()
        column = table[worst]
        rows.append(
            {
                "s": setting.s, "T": t, "n": setting.examples, "q": setting.theorem.q, "measured": column.mean(),
                "error": column.std() / math.sqrt(len(column)) if len(column) > 1 else 0.0,
                "bound": setting.theorem.bound(int(t), setting.eps),  # type: ignore[call-overload]
            }
        )  # fmt: skip
    return DataFrame(rows)
