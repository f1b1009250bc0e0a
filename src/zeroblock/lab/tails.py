"""The upper tails of ρ against Proposition 3.6."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame

from . import figure
from .alignment import ENSEMBLES
from .bounds import Tail
from .quadratic import Hessian, heterogeneous
from .runner import Runner
from .study import Frames

NAMES = ("low-rank", "sparse (Bernoulli)", "block-sparse")


def _bound(tail: Tail, name: str, excess: float) -> float:
    if name == "low-rank":
        return tail.low_rank(excess)
    return tail.sparse(excess) if name.startswith("sparse") else tail.block_sparse(excess)


def compare(hessian: Hessian, s: int, name: str, draws: int, seed: int, points: int = 60) -> DataFrame:
    """Empirical P(ρ ≥ E[ρ] + Δ) and its bound on a grid of Δ that ends past the largest draw.

    ``error`` is the binomial standard error of a share whose expectation equals the bound: it may exceed the bound by
    that much.
    """
    tail = Tail(hessian, s)
    rho = ENSEMBLES[name].sample(hessian, s, draws, seed).numpy()
    reach = max(float(rho.max()) - tail.threshold(1e-300), 1e-3 * hessian.intdim)
    rows = []
    for excess in np.linspace(reach / points, 1.2 * reach, points):
        bound = _bound(tail, name, float(excess))
        published = tail.low_rank(float(excess), "published") if name == "low-rank" else bound
        share = float((rho >= tail.threshold(float(excess)) - 1e-12).mean())
        rows.append({"projection": name, "s": s, "excess": excess, "empirical": share, "bound": bound,
                     "published": published, "error": math.sqrt(bound * (1 - bound) / draws)})  # fmt: skip
    return DataFrame(rows)


def _job(dim: int, rank: int, blocks: int, s: int, name: str, draws: int, seed: int) -> DataFrame:
    return compare(heterogeneous(dim, rank, blocks, seed=seed), s, name, draws, seed + 1)


@dataclasses.dataclass(frozen=True)
class Tails:
    """Empirical upper tails with the bound of each projection, in three panels."""

    dim: int = 1024
    rank: int = 16
    blocks: int = 16
    s: int = 64
    draws: int = 5_000
    seed: int = 0

    name = "tails"
    tables = ("tails",)

    @property
    def jobs(self) -> int:
        return len(NAMES)

    @property
    def captions(self) -> dict[str, str]:
        return {
            "tails": (
                f"P(ρ ≥ E[ρ] + Δ) over {self.draws:,} draws (d = {self.dim}, s = {self.s}, rank {self.rank} per block) "
                "and Proposition 3.6: low-rank with the constant c₁ = (d-2)/(8d), which holds for every H, and "
                "with the "
                "proof's 1/(8λmax²), which holds for λmax ≥ 1 and says nothing at λmax = 102 as here; sparse "
                "with c₂ = 1 - s/d, block-sparse exact."
            )
        }

    def measure(self, run: Runner) -> Frames:
        import pandas

        setting = (self.dim, self.rank, self.blocks, self.s)
        parts = run([functools.partial(_job, *setting, name, self.draws, self.seed) for name in NAMES])
        return {"tails": pandas.concat(parts, ignore_index=True)}

    def draw(self, frames: Frames) -> dict[str, Figure]:
        frame = frames["tails"]
        drawn, grid = figure.sheet(figure.WIDE, 2.6, 1, len(NAMES))
        bounds = {
            "low-rank": r"bound, $c_1 = \frac{d-2}{8d}$",
            "sparse (Bernoulli)": r"bound, $c_2 = 1-\frac{s}{d}$",
            "block-sparse": "share of blocks, exact",
        }
        for axes, name in zip(grid, NAMES, strict=True):
            mine = frame[frame.projection == name]
            block = name == "block-sparse"
            seen = mine if block else mine[mine.empirical > 0]
            where = {"drawstyle": "steps-pre"} if block else {}
            axes.plot(mine.excess, mine.bound, color=figure.BOUND, linewidth=3 if block else 1.2,
                      alpha=0.5 if block else 1, label=bounds[name], **where)  # fmt: skip
            if name == "low-rank":
                axes.plot(mine.excess, mine.published, color="#CC79A7", linestyle="--",
                          label=r"bound, $c_1 = 1/(8\lambda_{\max}^2)$")  # fmt: skip
            every = slice(None, None, 2)
            axes.plot(seen.excess[every], seen.empirical[every], figure.MARKERS[name], color=figure.COLOURS[name],
                      markersize=2.5, label="measured")  # fmt: skip
            axes.set(title=name, xlabel=r"$\Delta$ above the mean of $\rho$")
            if block:
                axes.set_ylim(0, 0.75)
                axes.legend(loc="upper right")
            else:
                axes.set(yscale="log", ylim=(0.5 / self.draws, 3))
                axes.legend(loc="lower left")
        grid[0].set_ylabel(r"$P(\rho \geq \mathrm{E}[\rho] + \Delta)$")
        figure.panels(list(grid))
        return {"tails": drawn}
