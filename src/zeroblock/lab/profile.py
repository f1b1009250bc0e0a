"""The figures and the summary of the rows that :mod:`.depth` wrote: blocks from input to output, along a run."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from ..errors import ZeroBlockError
from . import figure
from .adaptive import FLOOR, PLAIN

HEADINGS = (
    "run", "step", "λmax(H)", "largest ρ_B", "ρ_B two errors above 0", "adaptive schedule", "cost-aware schedule",
    "adaptive ranks like ‖∇_B L‖², like ρ_B",
)  # fmt: skip
"""Columns of the summary; the last has rank correlations with the probability of the adaptive schedule."""


def read(path: Path) -> DataFrame:
    """Rows of a table; a last line that a killed run cut short is skipped."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        frame = pandas.read_csv(io.StringIO("".join(line for line in lines if line.endswith("\n"))))
    except (OSError, ValueError) as error:
        raise ZeroBlockError(f"cannot read {path}, which zeroblock lab blocks writes: {error}") from error
    lacking = {"step", "way", "block", "rho", "trace", "gradient", "probability", "model_top"} - set(frame.columns)
    if lacking or frame.empty:
        missing = f"the columns {', '.join(sorted(lacking))}" if lacking else "rows"
        raise ZeroBlockError(f"{path} is not a table of zeroblock lab blocks: it lacks {missing}")
    return frame


def draw(frame: DataFrame) -> dict[str, Figure]:
    """The figures of one run, by name."""
    ways = list(dict.fromkeys(frame.way))
    subject = str(frame.subject.iloc[0]) if "subject" in frame else ""
    drawn = {"blocks": _by_depth(frame[frame.way == ways[0]], subject)}
    if len(ways) > 1:
        drawn["blocks_agreement"] = _agreement(frame)
    return drawn


def summary(frame: DataFrame) -> list[str]:
    """One line of a Markdown table per measurement of a run; ``HEADINGS`` names the columns."""
    lines = []
    for step, mine in frame[frame.way == frame.way.iloc[0]].groupby("step"):
        subject = mine.subject.iloc[0] if "subject" in mine else ""
        best = mine.loc[mine.rho.idxmax()] if mine.rho.notna().any() else None
        cells = [
            str(subject), f"{step:,}", f"{mine.model_top.iloc[0]:,.0f}",
            "unknown" if best is None else f"{best.rho:.2f} ± {best.rho_error:.2f} (block {best.block:.0f})",
            f"{int((mine.rho >= 2 * mine.rho_error).sum())} of {len(mine)}",
            _choice(mine.block, mine.probability),
            _choice(mine.block, mine.economical) if "economical" in mine else "unknown",
            ", ".join(_correlation(mine.probability, mine[name]) for name in ("gradient", "rho")),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _choice(blocks: Any, p: Any) -> str:
    """A schedule's preference in words: uniform, or its likeliest block and the range of the others."""
    if p.max() - p.min() < 1e-9:
        return "uniform"
    likeliest = p.idxmax()
    others = p.drop(likeliest)
    rest = f"{others.min():.2g} to {others.max():.2g}" if others.max() >= FLOOR else f"below {FLOOR:g}"
    return f"block {blocks[likeliest]}: {p[likeliest]:.2g}; others {rest}"


def _correlation(p: Any, other: Any) -> str:
    """Spearman's rank correlation, which a softmax does not change."""
    found = p.corr(other, method="spearman") if p.nunique() > 1 else math.nan
    return "–" if math.isnan(found) else f"{found:.2f}"


def _by_depth(frame: DataFrame, subject: str) -> Figure:
    """Panels that share an axis of blocks, one column wide."""
    chances = {"probability": "adaptive schedule"}
    if "economical" in frame:
        chances["economical"] = "cost-aware schedule"
    costly = "cost" in frame and frame.cost.nunique() > 1
    count = 2 + costly + len(chances)
    drawn, grid = figure.sheet(figure.COLUMN, 0.7 + 1.35 * count, count, 1, sharex=True)
    rho, gradient, *rest = grid
    steps = sorted(frame.step.unique())
    known = bool(frame.rho.notna().any())
    value = "rho" if known else "trace"
    gradient.set_yscale("log")
    for colour, marker, step in zip(figure.sequence(len(steps)), "osD^v<>" * len(steps), steps, strict=False):
        mine = frame[frame.step == step]
        look = {"color": colour, "markersize": 2, "linewidth": 0.7,
                "label": "start" if step == 0 else f"step {step:,}"}  # fmt: skip
        bars = {"fmt": f"{marker}-", "capsize": 1, "elinewidth": 0.5, "capthick": 0.5, **look}
        rho.errorbar(mine.block, mine[value], mine[f"{value}_error"].fillna(0.0), **bars)
        low = np.minimum(mine.gradient_error.fillna(0.0), 0.9 * mine.gradient)  # a log axis has no zero
        gradient.errorbar(mine.block, mine.gradient, low, **bars)
        for axes, column in zip(rest[-len(chances) :], chances, strict=True):
            axes.plot(mine.block, mine[column].clip(lower=FLOOR), f"{marker}-", **look)
    _straddle(rho, frame[value])
    rho.set(ylabel=r"$\rho_B$" if known else r"$\mathrm{Tr}(H_B)$",
            title=r"alignment $\mathrm{Tr}(H_B)/\lambda_{\max}(H)$" if known else "trace of the Hessian")  # fmt: skip
    gradient.set(ylabel=r"$\|\nabla_B L\|^2$", title="squared gradient norm")
    if costly:
        first = frame[frame.step == steps[0]]
        rest[0].bar(first.block, first.cost, color=figure.GREY, width=0.7)
        rest[0].axhline(1, color=figure.GREY, linestyle=":", linewidth=0.9)
        rest[0].set(ylabel="cost / mean", title="seconds per step")
    for axes, title in zip(rest[-len(chances) :], chances.values(), strict=True):
        axes.axhline(1 / frame.block.nunique(), color=figure.GREY, linestyle=":", linewidth=0.9)
        axes.set(yscale="log", ylabel="probability", title=title)
    rest[-len(chances)].set_ylim(0.7 * FLOOR, 1.5)
    if "economical" in chances:  # the schedule's floor keeps them within a decade or two
        low, high = frame.economical.min() / 1.2, frame.economical.max() * 1.2
        rest[-1].set_ylim(low, high)
        figure.plain_ticks(rest[-1].yaxis, [tick for tick in PLAIN if low <= tick <= high])
    rest[-len(chances)].annotate(
        "uniform", (0.55, 1 / frame.block.nunique()), (0, 5), xycoords=("axes fraction", "data"), ha="center",
        fontsize=6.5, textcoords="offset points", color=figure.GREY,
    )  # fmt: skip
    grid[-1].set_xlabel("block, from input to output")
    figure.panels(list(grid))
    drawn.align_ylabels(list(grid))
    handles, labels = gradient.get_legend_handles_labels()
    drawn.legend(
        handles, labels, loc="outside upper center", ncols=min(3, len(labels)), title=subject or None, title_fontsize=7
    )
    return drawn


def _straddle(axes: Axes, values: Any) -> None:
    """Scale an axis for values that mostly lie near zero: linear up to about the median size, logarithmic beyond."""
    axes.axhline(0, color=figure.GREY, linewidth=0.6)
    typical = float(np.nanmedian(values.abs()))
    if not typical > 0:
        return
    decade = math.ceil(math.log10(typical))
    axes.set_yscale("symlog", linthresh=10.0**decade, linscale=1)
    low, high = axes.get_ylim()
    powers = [10.0**k for k in range(decade, decade + 8)]
    axes.set_yticks([t for t in (0.0, *powers, *(-x for x in powers)) if low <= t <= high])
    axes.minorticks_off()


def _agreement(frame: DataFrame) -> Figure:
    drawn, grid = figure.sheet(figure.WIDE, 2.5, 1, 3)
    titles = {"trace": r"$\mathrm{Tr}(H_B)$", "gradient": r"$\|\nabla_B L\|^2$", "variance": "Var $c$"}
    for axes, (quantity, title) in zip(grid, titles.items(), strict=True):
        key = ["step", "block"]
        both = frame[frame.way == "backward"].merge(frame[frame.way == "forward"], on=key, suffixes=("_b", "_f"))
        x, y = both[f"{quantity}_b"], both[f"{quantity}_f"]
        axes.errorbar(
            x, y, both[f"{quantity}_error_f"].fillna(0.0), both[f"{quantity}_error_b"].fillna(0.0), fmt="o",
            color=figure.MEASURED, markersize=2.5, linewidth=0.6, alpha=0.8,
        )  # fmt: skip
        if min(x.min(), y.min()) > 0:
            axes.set(xscale="log", yscale="log")
        axes.axline((float(x.median()), float(x.median())), (float(x.max()), float(x.max())), color=figure.BOUND,
                    linestyle="--", linewidth=0.9)  # fmt: skip
        axes.set(xlabel="by Hessian-vector products" if quantity == "trace" else "by backpropagation", title=title)
    grid[0].set_ylabel("by forward passes")
    return drawn
