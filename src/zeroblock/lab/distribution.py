"""The distribution of ρ over M, for the three projections: violins, boxen on a log scale, strips, and the mean."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from pandas import DataFrame

from . import figure
from .alignment import ENSEMBLES
from .quadratic import heterogeneous
from .runner import Runner
from .study import Frames

SIZES = (16, 32, 64, 128, 256)
SHOWN = ("low-rank", "sparse", "block-sparse")


def _sample(dim: int, rank: int, blocks: int, s: int, name: str, draws: int, seed: int) -> DataFrame:
    h = heterogeneous(dim, rank, blocks, seed=seed)
    rho = ENSEMBLES[name].sample(h, s, draws, seed + 1).numpy()
    moments = ENSEMBLES[name].moments(h, s)
    frame = DataFrame({"rank": rank, "s": s, "projection": name, "rho": rho})
    frame.attrs = {"mean": moments.mean, "variance": moments.variance}
    return frame


@dataclasses.dataclass(frozen=True)
class Distribution:
    """Right panel of the paper's first figure, its two supplementary views, and E[ρ] against its closed form."""

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
        what = (
            f"{self.draws:,} draws of M on a block-diagonal Hessian (d = {self.dim}, {self.blocks} blocks with spectra "
            "around 10, 40, 70 or 100)"
        )
        captions: dict[str, str] = {}
        for rank in self.ranks:
            captions |= {
                f"alignment_rank{rank}": f"Distribution of ρ, rank {rank} a block, {what}: the three means coincide "
                "with Proposition 3.4 (dashes), block-sparse spreads far wider than the other two.",
                f"alignment_rank{rank}_boxen": f"The same (rank {rank} a block) as letter-value boxes on a log scale: "
                "the lower tails.",
                f"alignment_rank{rank}_strip": f"The same (rank {rank} a block), every draw a point: block-sparse "
                "takes one value a block.",
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
            for kind, suffix in (("violin", ""), ("boxen", "_boxen"), ("strip", "_strip")):
                drawn[f"alignment_rank{rank}{suffix}"] = _view(kind, mine, means, rank)
        drawn["alignment_mean"] = _means(summary)
        return drawn


def _view(kind: str, draws: DataFrame, means: DataFrame, rank: int) -> Figure:
    import seaborn

    drawn, axes = figure.sheet(figure.COLUMN, 2.5)
    common: dict[str, Any] = {"data": draws, "x": "s", "y": "rho", "hue": "projection", "ax": axes}
    common |= {"hue_order": SHOWN, "palette": {name: figure.COLOURS[name] for name in SHOWN}}
    if kind == "violin":
        # a density of the block-sparse values would invent some between them; cut=0 keeps to the range
        seaborn.violinplot(**common, cut=0, inner=None, linewidth=0.4, density_norm="width", width=0.85)
    elif kind == "boxen":
        axes.set_yscale("log")
        seaborn.boxenplot(**common, linewidth=0.4, width=0.8, flier_kws={"s": 2, "linewidth": 0.3})
    else:
        seaborn.stripplot(**common, dodge=True, size=1.3, alpha=0.35, jitter=0.32, linewidth=0, rasterized=True)
    if kind != "strip":  # the low-rank ones are hairs: an edge of their own colour keeps them visible
        for body in axes.collections:
            if not isinstance(body, PathCollection):  # which the outliers are
                body.set_edgecolor(body.get_facecolor())
                body.set_linewidth(1.2)
    _dashes(axes, means, behind=kind != "strip")
    axes.set(xlabel="srank(M) = s", ylabel=r"subspace alignment $\rho$")
    axes.grid(axis="x", visible=False)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if kind == "strip":
        from matplotlib.lines import Line2D

        unique = {n: Line2D([], [], marker="o", linestyle="", markersize=4, color=figure.COLOURS[n]) for n in SHOWN} | {
            k: v for k, v in unique.items() if k not in SHOWN
        }
    axes.legend(unique.values(), unique.keys(), loc="upper left" if kind != "boxen" else "lower right", title=None)
    axes.set_title(f"rank {rank} a block", loc="left")
    return drawn


def _dashes(axes: Axes, means: DataFrame, behind: bool) -> None:
    for i, s in enumerate(sorted(means.s.unique())):
        value = float(means[means.s == s].expected.iloc[0])
        label = r"E[$\rho$], Proposition 3.4" if i == 0 else ""
        axes.hlines(
            value, i - 0.48, i + 0.48, color="black", linestyle=(0, (3, 1.5)), linewidth=0.8, label=label,
            zorder=0.5 if behind else 5,
        )  # fmt: skip


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
        axes.set(xlabel="s", title=f"rank {rank} a block")
    grid[0][0].set_ylabel(r"mean $\rho$ / closed form")
    handles, labels = grid[0][0].get_legend_handles_labels()
    drawn.legend(handles, labels, ncols=4, loc="outside upper center")
    return drawn
