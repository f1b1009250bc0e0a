"""Upper tails of ρ against Proposition 3.6."""

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

    ``error`` is the binomial standard error of the share under the bound: what a share that equals it may exceed it by.
    """
    tail = Tail(hessian, s)
    rho = ENSEMBLES[name].sample(hessian, s, draws, seed).numpy()
    reach = max(float(rho.max()) - tail.threshold(1e-300), 1e-3 * hessian.intdim)
    rows = []
    for excess in np.linspace(reach / points, 1.2 * reach, points):
        bound = _bound(tail, name, float(excess))
        share = float((rho >= tail.threshold(float(excess)) - 1e-12).mean())
        rows.append({"projection": name, "s": s, "excess": excess, "empirical": share, "bound": bound,
                     "error": math.sqrt(bound * (1 - bound) / draws)})  # fmt: skip
    return DataFrame(rows)


def _job(dim: int, rank: int, blocks: int, s: int, name: str, draws: int, seed: int) -> DataFrame:
    return compare(heterogeneous(dim, rank, blocks, seed=seed), s, name, draws, seed + 1)


@dataclasses.dataclass(frozen=True)
class Tails:
    """Empirical upper tails, three panels, with the bound of each projection."""

    dim: int = 1024
    rank: int = 16
    blocks: int = 16
    s: int = 64
    draws: int = 10_000
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
                f"P(ρ ≥ E[ρ] + Δ) over {self.draws:,} draws (d = {self.dim}, s = {self.s}, rank {self.rank} a block) "
                "under Proposition 3.6: low-rank with the constant c₁ = (d-2)/(8d), which holds for every H (the proof's "
                "1/(8λmax²) holds for λmax ≥ 1, as here), sparse with c₂ = 1 - s/d, block-sparse exact."
            )
        }

    def measure(self, run: Runner) -> Frames:
        import pandas

        setting = (self.dim, self.rank, self.blocks, self.s)
        parts = run([functools.partial(_job, *setting, name, self.draws, self.seed) for name in NAMES])
        return {"tails": pandas.concat(parts, ignore_index=True)}

    def draw(self, frames: Frames) -> dict[str, Figure]:
        frame = frames["tails"]
        drawn, grid = figure.sheet(figure.WIDE, 2.2, 1, len(NAMES), sharey=True)
        says = {
            "low-rank": r"$e^{-c_1 d\Delta^2/s}$, $c_1 = \frac{d-2}{8d}$",
            "sparse (Bernoulli)": r"$c_2\,rs/(d\Delta^2)$, $c_2 = 1-\frac{s}{d}$",
            "block-sparse": r"$k(\hat\rho)\,s/d$, exact",
        }
        for axes, name in zip(grid, NAMES, strict=True):
            mine = frame[frame.projection == name]
            axes.set_yscale("log")
            seen = mine[mine.empirical > 0]
            axes.plot(
                mine.excess, mine.bound.where(mine.bound > 0), color=figure.BOUND, linestyle="--", label=says[name]
            )
            axes.plot(
                seen.excess, seen.empirical, figure.MARKERS[name], color=figure.COLOURS[name], markersize=2.5,
                label="measured",
            )  # fmt: skip
            axes.set(title=name, xlabel=r"$\Delta = \hat\rho - \mathrm{E}[\rho]$", ylim=(0.01 / self.draws, 3))
            axes.legend(loc="lower left")
        grid[0].set_ylabel(r"$P(\rho \geq \hat\rho)$")
        return {"tails": drawn}
