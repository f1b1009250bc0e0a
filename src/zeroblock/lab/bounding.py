"""The bounds against runs, and the lemmas against simulation: the study ``bounds``."""

from __future__ import annotations

import dataclasses
import functools

import pandas
from matplotlib.figure import Figure
from pandas import DataFrame

from . import figure, moment, rate, stability
from .runner import Runner
from .study import Frames


@dataclasses.dataclass(frozen=True)
class Bounding:
    """Theorem 3.3, Theorem 3.10 and the lemmas of the proofs."""

    rates: tuple[rate.Setting, ...] = (rate.Setting(s=128), rate.Setting(s=8))
    stabilities: tuple[stability.Setting, ...] = tuple(stability.Setting(s=s) for s in (4, 16, 64))
    seeds: int = 3
    pairs: int = 32
    draws: int = 200_000

    name = "bounds"
    tables = ("bounds_rate", "bounds_stability", "bounds_lemmas")

    @property
    def jobs(self) -> int:
        return len(self.rates) * self.seeds + len(self.stabilities) * self.pairs + 1

    @property
    def captions(self) -> dict[str, str]:
        return {
            "bounds_rate": (
                "Mean squared gradient norm of runs at the largest step Theorem 3.3 allows, with its right side as "
                "published and corrected: the published bound is crossed where d/s is large (right), because "
                "E[ĝ] = M²∇L and not ∇L; the corrected one, larger by d/(4s), holds."
            ),
            "bounds_stability": (
                "Two runs with the same noise on data sets that differ in one example: the largest mean difference of "
                "their losses, under the bound of Theorem 3.10, for three sizes of the subspace."
            ),
            "bounds_lemmas": (
                "Statements of the paper's proofs, measured: the ratio of the measured to the stated value, hollow "
                "where the statement fails (see docs/theory.md)."
            ),
        }

    def measure(self, run: Runner) -> Frames:
        jobs = [
            functools.partial(rate.against_bound, setting, seed) for setting in self.rates for seed in range(self.seeds)
        ]
        pairs = [
            functools.partial(stability.pair, setting, seed)
            for setting in self.stabilities
            for seed in range(self.pairs)
        ]
        done = run([*jobs, *pairs, functools.partial(moment.checks, self.draws)])
        rates = pandas.concat(done[: len(jobs)], ignore_index=True)
        stabilities = []
        for i, setting in enumerate(self.stabilities):
            first = len(jobs) + i * self.pairs
            stabilities.append(stability.summarise(pandas.concat(done[first : first + self.pairs]), setting))
        lemmas = DataFrame([dataclasses.asdict(check) | {"holds": check.holds} for check in done[-1]])
        return {
            "bounds_rate": rates,
            "bounds_stability": pandas.concat(stabilities, ignore_index=True),
            "bounds_lemmas": lemmas,
        }

    def draw(self, frames: Frames) -> dict[str, Figure]:
        return {
            "bounds_rate": _rate(frames["bounds_rate"]),
            "bounds_stability": _stability(frames["bounds_stability"]),
            "bounds_lemmas": _lemmas(frames["bounds_lemmas"]),
        }


def _rate(frame: DataFrame) -> Figure:
    sizes = list(dict.fromkeys(frame.s))
    drawn, grid = figure.sheet(figure.WIDE, 2.4, 1, len(sizes), squeeze=False, sharey=True)
    for axes, s in zip(grid[0], sizes, strict=True):
        mine = frame[frame.s == s]
        axes.set(xscale="log", yscale="log")
        for column, colour, dash, label in (
            ("corrected", figure.BOUND, "--", r"corrected: $\frac{2d}{s}\frac{\Delta}{\alpha T}$"),
            ("published", "#CC79A7", "-.", "published"),
            ("measured", figure.MEASURED, "-", "measured"),
        ):
            rows = mine.pivot(index="seed", columns="T", values=column)
            figure.band(axes, rows.columns, rows.to_numpy(), colour, label, linestyle=dash)
        axes.set(xlabel="T", title=f"s = {s}, d/s = {mine.d.iloc[0] / s:g}")
    grid[0][0].set_ylabel(r"$\frac{1}{T}\sum_t \|\nabla L(\theta_t)\|^2$")
    from matplotlib.ticker import NullFormatter

    for axes in grid[0]:
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(frame[["measured", "published", "corrected"]].min().min() / 3, frame.corrected.max() * 3)
    grid[0][-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return drawn


def _stability(frame: DataFrame) -> Figure:
    sizes = list(dict.fromkeys(frame.s))
    drawn, axes = figure.sheet(figure.COLUMN, 2.6)
    axes.set(xscale="log", yscale="log", xlabel="T", ylabel="difference of losses")
    for colour, s in zip(figure.sequence(len(sizes)), sizes, strict=True):
        mine = frame[(frame.s == s)]
        axes.plot(mine["T"], mine.bound, color=colour, linestyle="--")
        seen = mine[mine.measured > 0]
        label = f"s = {s}, q = {mine.q.iloc[0]:.2f}"
        axes.errorbar(
            seen["T"], seen.measured, seen.error.clip(upper=0.9 * seen.measured), fmt="o-", color=colour, markersize=3,
            capsize=2, linewidth=0.9, label=label,
        )  # fmt: skip
    axes.plot([], [], color=figure.GREY, linestyle="--", label="Theorem 3.10")
    drawn.legend(loc="outside upper center", ncols=2)
    return drawn


def _lemmas(frame: DataFrame) -> Figure:
    drawn, axes = figure.sheet(figure.WIDE, 0.21 * len(frame) + 0.6)
    ratio = frame.measured / frame.stated
    # one statement is off by 42 orders of magnitude; the axis ends before it
    shown = ratio.clip(upper=1e3)
    for i, (x, holds, relation) in enumerate(zip(shown, frame.holds, frame.relation, strict=True)):
        colour = figure.MEASURED if holds else figure.BOUND
        axes.plot(
            x,
            i,
            "o" if relation == "=" else "<",
            color=colour,
            markerfacecolor=colour if holds else "white",
            markersize=5,
        )
        if ratio[i] > 1e3:
            axes.annotate(
                "off the scale", (x, i), (-6, 0), textcoords="offset points", ha="right", va="center", fontsize=6.5
            )
    axes.axvline(1, color="black", linestyle=(0, (3, 1.5)), linewidth=0.8, zorder=0)
    axes.set(xscale="log", xlabel="measured / stated", ylim=(len(frame) - 0.4, -0.6))
    axes.set_yticks(range(len(frame)), frame.statement)
    from matplotlib.lines import Line2D

    key = [
        Line2D([], [], marker="o", linestyle="", color=figure.GREY, label="an equality"),
        Line2D([], [], marker="<", linestyle="", color=figure.GREY, label="a bound"),
        Line2D([], [], marker="o", linestyle="", color=figure.BOUND, markerfacecolor="white", label="fails"),
    ]
    axes.legend(handles=key, loc="upper right")
    return drawn
