"""Theorem 3.3 against runs: the mean squared gradient norm, the published bound, the corrected one."""

from __future__ import annotations

import dataclasses

import numpy as np
from pandas import DataFrame

from .bounds import Alignments, Rate
from .descent import descend
from .projection import LowRank
from .quadratic import hessian


@dataclasses.dataclass(frozen=True)
class Setting:
    """A quadratic and a subspace; the step size is the largest that Theorem 3.3 allows."""

    dim: int = 256
    rank: int = 64
    s: int = 64
    steps: int = 2000


def against_bound(setting: Setting, seed: int, points: int = 40) -> DataFrame:
    """(1/T)Σ‖∇L(θ_t)‖² of one run for T up to ``steps``, with both bounds at each T.

    The M_t are functions of seed and step alone, so a run at lr = 0 visits those of the run proper, and tells
    ρ̄ and ρmax before a step size is chosen by them.
    """
    h = hessian(setting.dim, setting.rank)
    projection = LowRank(setting.s)
    still = descend(h, projection, lr=0.0, eps=1e-4, steps=setting.steps, seed=seed, every=1)
    rate = Rate(h.top, h.dim, setting.s, h.intdim, Alignments.of(still.rho.tolist()))
    lr, eps = rate.max_step, rate.smoothing(setting.steps)
    trace = descend(h, projection, lr=lr, eps=eps, steps=setting.steps, seed=seed, origin=0, every=setting.steps)
    running = np.cumsum(trace.gradient) / np.arange(1, len(trace.gradient) + 1)
    rows = []
    for t in np.unique(np.geomspace(10, setting.steps, points).astype(int)):
        gap = max(0.0, trace.loss[0] - trace.loss[t])  # smoothing adds the same constant to both
        rows.append(
            {
                "s": setting.s, "d": setting.dim, "seed": seed, "T": int(t), "lr": lr, "eps": eps,
                "mean_rho": rate.rho.mean, "max_rho": rate.rho.max, "measured": running[t - 1],
                "published": rate.published(gap=gap, lr=lr, steps=int(t), eps=eps),
                "corrected": rate.corrected(gap=gap, lr=lr, steps=int(t)),
            }
        )  # fmt: skip
    return DataFrame(rows)
