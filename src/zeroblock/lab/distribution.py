"""The distribution of ρ over M for the three projections: shapes, nested boxes, single draws, and the mean."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from pandas import DataFrame

from . import figure
from .alignment import ENSEMBLES
from .quadratic import heterogeneous
from .runner import Runner
from .study import Frames

SIZES = (16, 32, 64, 128, 256)
SHOWN = ("low-rank", "sparse", "block-sparse")
MEAN: dict[str, Any] = {"marker": "D", "linestyle": "", "color": "black", "markerfacecolor": "white", "markersize": 2.6,
                        "markeredgewidth": 0.7, "zorder": 5}  # fmt: skip
SHARES = (0.5, 0.9, 0.99)
"""Central shares of the draws in the nested boxes."""


def _sample(dim: int, rank: int, blocks: int, s: int, name: str, draws: int, seed: int) -> DataFrame:
    h = heterogeneous(dim, rank, blocks, seed=seed)
    rho = ENSEMBLES[name].sample(h, s, draws, seed + 1).numpy()
    moments = ENSEMBLES[name].moments(h, s)
    frame = DataFrame({"rank": rank, "s": s, "projection": name, "rho": rho})
    frame.attrs = {"mean": moments.mean, "variance": moments.variance}
    return frame


@dataclasses.dataclass(frozen=True)
class Distribution:
    """The right panel of the paper's first figure, its two supplementary views, and E[ρ] against its closed form."""

    dim: int = 1024
    blocks: int = 16
    ranks: tuple[int, ...] = (64, 16)
    sizes: tuple[int, ...] = SIZES
    draws: int = 1000
    seed: int = 0

    name = "alignment"
    tables = ("alignment", "alignment_draws")

    @property
    def jobs(self) -> int:
        return len(self.ranks) * len(self.sizes) * len(ENSEMBLES)

    @property
    def captions(self) -> dict[str, str]:
        setting = (
            f"{self.draws:,} draws of M on a block-diagonal Hessian (d = {self.dim}, {self.blocks} blocks with spectra "
            "around 10, 40, 70 or 100)"
        )
        captions: dict[str, str] = {}
        for rank in self.ranks:
            captions |= {
                f"alignment_rank{rank}": f"Distribution of ρ, rank {rank} per block, {setting}: each mean (white "
                "diamonds) lies on Proposition 3.4's (black); block-sparse takes one value per block (dots, "
                "whose area is the share "
                "of draws) and spreads far wider than the other two.",
                f"alignment_rank{rank}_boxen": f"The same (rank {rank} per block) on a log scale, which shows "
                f"the lower "
                "tails: nested boxes hold the central 50, 90 and 99 % of the draws.",
                f"alignment_rank{rank}_strip": f"The same (rank {rank} per block) with a point for every draw.",
            }
        captions["alignment_mean"] = (
            "Measured mean of ρ over its closed form s·Tr(H)/(d·λmax), with two standard errors: all three "
            "projections, the sparse one in both readings (exactly s coordinates, and Bernoulli), agree with "
            "Proposition 3.4."
        )
        return captions

    def measure(self, run: Runner) -> Frames:
        jobs = [
            functools.partial(_sample, self.dim, rank, self.blocks, s, name, self.draws, self.seed)
            for rank in self.ranks
            for s in self.sizes
            for name in ENSEMBLES
        ]
        frames: list[DataFrame] = run(jobs)
        rows = []
        for frame in frames:
            rho = frame.rho.to_numpy()
            error = rho.std(ddof=1) / math.sqrt(len(rho))
            rows.append(
                {
                    "rank": frame["rank"].iloc[0], "s": frame.s.iloc[0], "projection": frame.projection.iloc[0],
                    "draws": len(rho), "mean": rho.mean(), "error": error, "expected": frame.attrs["mean"],
                    "z": (rho.mean() - frame.attrs["mean"]) / error if error > 0 else 0.0,
                    "std": rho.std(ddof=1), "expected_std": math.sqrt(frame.attrs["variance"]),
                    "min": rho.min(), "median": np.median(rho), "max": rho.max(),
                }
            )  # fmt: skip
        for frame in frames:
            frame.attrs = {}  # they differ, and concatenation would compare them
        return {"alignment": DataFrame(rows), "alignment_draws": pd.concat(frames, ignore_index=True)}

    def draw(self, frames: Frames) -> dict[str, Figure]:
        drawn: dict[str, Figure] = {}
        summary, draws = frames["alignment"], frames["alignment_draws"]
        draws = draws[draws.projection.isin(SHOWN)]
        for rank in self.ranks:
            mine, means = draws[draws["rank"] == rank], summary[summary["rank"] == rank]
            for kind, suffix in (("shapes", ""), ("boxes", "_boxen"), ("points", "_strip")):
                drawn[f"alignment_rank{rank}{suffix}"] = _view(kind, mine, means, rank)
        drawn["alignment_mean"] = _means(summary)
        return drawn


def _view(kind: str, draws: DataFrame, means: DataFrame, rank: int) -> Figure:
    """One column: ρ against s, the three projections side by side, each with its mean; and E[ρ] across them."""
    drawn, axes = figure.sheet(figure.COLUMN, 2.7)
    if kind == "boxes":
        axes.set_yscale("log")
    rng = np.random.default_rng(0)
    sizes = sorted(means.s.unique())
    for i, s in enumerate(sizes):
        expected = float(means[means.s == s].expected.iloc[0])
        axes.hlines(expected, i - 0.46, i + 0.46, color="black", linewidth=0.8, zorder=1)
        for k, name in enumerate(SHOWN):
            rho = draws[(draws.s == s) & (draws.projection == name)].rho.to_numpy()
            x, colour = i + (k - 1) * 0.3, figure.COLOURS[name]
            if kind == "points":
                axes.scatter(x + rng.uniform(-0.11, 0.11, len(rho)), rho, s=0.8, color=colour, alpha=0.3, linewidths=0,
                             rasterized=True)  # fmt: skip
            elif kind == "boxes":
                for level, share in enumerate(SHARES):
                    low, high = np.quantile(rho, [(1 - share) / 2, (1 + share) / 2])
                    width = 0.24 * (1 - 0.3 * level)
                    axes.fill_between([x - width / 2, x + width / 2], low, high, color=colour,
                                      alpha=0.75 - 0.25 * level, linewidth=0.3)  # fmt: skip
            else:
                _shape(axes, x, rho, colour, discrete=name == "block-sparse")
            axes.plot(x, rho.mean(), **MEAN)
    axes.set_xticks(range(len(sizes)), [str(s) for s in sizes])
    axes.set(xlabel="dimensions of the subspace, s", ylabel=r"subspace alignment $\rho$", xlim=(-0.5, len(sizes) - 0.5))
    axes.set_title(f"rank {rank} per block", loc="left")
    axes.grid(axis="x", visible=False)
    for edge in range(1, len(sizes)):
        axes.axvline(edge - 0.5, color=figure.GREY, linewidth=0.3)
    key: list[Any] = [Line2D([], [], marker="s", linestyle="", color=figure.COLOURS[n], label=n) for n in SHOWN]
    key += [
        Line2D([], [], **MEAN, label="mean of its draws"),
        Line2D([], [], color="black", linewidth=0.8, label=r"E[$\rho$], Proposition 3.4"),
    ]
    if kind == "boxes":
        key += [Patch(color=figure.GREY, alpha=0.75 - 0.25 * i, label=f"{share:.0%} of draws")
                for i, share in enumerate(SHARES)]  # fmt: skip
    drawn.legend(handles=key, loc="outside upper center", ncols=2)
    return drawn


def _shape(axes: Axes, x: float, rho: Any, colour: str, discrete: bool) -> None:
    """A violin; for a discrete distribution a dot per value, with the share of its draws as area."""
    if discrete:
        values, counts = np.unique(rho.round(9), return_counts=True)
        axes.scatter(np.full(len(values), x), values, s=120 * counts / len(rho), color=colour, linewidths=0, zorder=3)
        return
    body = axes.violinplot(rho, [x], widths=0.26, showextrema=False)["bodies"][0]  # type: ignore[index]
    body.set(facecolor=colour, edgecolor=colour, alpha=1, linewidth=1.0)


def _means(summary: DataFrame) -> Figure:
    ranks = list(dict.fromkeys(summary["rank"]))
    drawn, grid = figure.sheet(figure.WIDE, 2.3, 1, len(ranks), sharey=True, squeeze=False)
    names = list(ENSEMBLES)
    for axes, rank in zip(grid[0], ranks, strict=True):
        mine = summary[summary["rank"] == rank]
        sizes = sorted(mine.s.unique())
        for k, name in enumerate(names):
            part = mine[mine.projection == name].sort_values("s")
            x = np.arange(len(sizes)) + (k - (len(names) - 1) / 2) * 0.18
            hollow = {"markerfacecolor": "white"} if name == "sparse (Bernoulli)" else {}
            axes.errorbar(
                x, part["mean"] / part.expected, 2 * part.error / part.expected, fmt=figure.MARKERS[name],
                color=figure.COLOURS[name], markersize=3.5, capsize=2, linewidth=0.9, label=name, **hollow,
            )  # fmt: skip
        axes.axhline(1, color="black", linestyle=(0, (3, 1.5)), linewidth=0.8, zorder=0)
        axes.set_xticks(range(len(sizes)), [str(s) for s in sizes])
        axes.set(xlabel="s", title=f"rank {rank} per block")
    grid[0][0].set_ylabel(r"mean $\rho$ / closed form")
    handles, labels = grid[0][0].get_legend_handles_labels()
    drawn.legend(handles, labels, ncols=4, loc="outside upper center")
    return drawn
