"""The study ``bounds``: Theorems 3.3 and 3.10 against runs, and every lemma against simulation or quadrature."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pandas import DataFrame

from . import event, figure, moment, rate, smoothing, stability
from .check import Check, Role
from .runner import Runner
from .study import Frames

VIOLATED = "#CC79A7"
"""Colour of the region in which a bound is violated."""


def lemmas(draws: int) -> list[Check]:
    """Every check that needs no run."""
    few = max(1000, draws // 10)
    return [
        *moment.moments(draws),
        *smoothing.smoothed(),
        *smoothing.estimated(few),
        *event.events(),
        *event.spheres(few),
        *event.tails(draws),
    ]


def stability_checks(setting: stability.Setting, pairs: int, sets: int, measured: float, error: float) -> list[Check]:
    """Lemmas 3.9 and C.2 at one setting; ``measured`` is ε_stab from the pairs of runs."""
    gap, gap_error = stability.generalization(setting, sets)
    return [
        Check(
            "3.9",
            "ε_gen ≤ ε_stab",
            "ε_gen ≤ ε_stab, both measured",
            measured,
            "≤",
            gap,
            math.hypot(gap_error, error),
            reading=f"{sets} data sets against neighbouring runs, s = {setting.s}, C = {setting.rate:g}, T = "
            f"{setting.steps}",
        ),
        Check(
            "C.2",
            "recursion of δ_t",
            "E δ_{t+1} ≤ (1 + αL√s)E δ_t + …, ratio",
            1.0,
            "≤",
            *stability.recursion(setting, 4 * pairs),
            reading="largest of 60 steps, from δ = 0 and δ = 1; Δ_t on the left is read as Δ_{t+1}",
        ),
    ]


def _row(check: Check) -> dict[str, object]:
    ratio = check.ratio if check.stated else math.inf
    return dataclasses.asdict(check) | {"role": str(check.role), "holds": check.holds, "ratio": ratio}


@dataclasses.dataclass(frozen=True)
class Bounding:
    """Theorem 3.3, Theorem 3.10 and the lemmas of their proofs.

    Args:
        rates: quadratics for Theorem 3.3.
        stabilities: settings for Theorem 3.10; the last of them is also used for Lemmas 3.9 and C.2.
        seeds: runs per quadratic.
        pairs: number of pairs of neighbouring runs.
        sets: number of data sets for the generalization error.
        draws: Gaussian vectors per moment.
        quadratics: random quadratics for the corrected bounds.
    """

    rates: tuple[rate.Setting, ...] = tuple(rate.Setting(s=s) for s in (8, 32, 128))
    stabilities: tuple[stability.Setting, ...] = tuple(
        stability.Setting(s=s, rate=c) for c in (8.0, 1.0) for s in (4, 16, 64)
    )
    seeds: int = 64
    pairs: int = 400
    sets: int = 800
    draws: int = 200_000
    quadratics: int = 40

    name = "bounds"
    tables = ("bounds_rate", "bounds_counterexamples", "bounds_corrected", "bounds_stability", "bounds_lemmas")

    @property
    def jobs(self) -> int:
        return len(self.rates) + len(self.stabilities) + 4

    @property
    def captions(self) -> dict[str, str]:
        s = ", ".join(str(setting.s) for setting in self.rates)
        return {
            "bounds_rate": (
                f"Theorem 3.3 with the constants of its proof, d = {self.rates[0].dim}, s = {s}, {self.seeds} "
                f"runs: (a) "
                "measured mean squared gradient norm over the bound; above 1 the bound is violated. Dashed: over the "
                "corrected bound. (b) At T = 2,000 the ratio is d/(8s), for losses of bounded gradient too. (c) The "
                f"corrected bounds on {self.quadratics} random quadratics per ensemble, at the largest step size they "
                "allow; the last two are block descent in cycles."
            ),
            "bounds_stability": (
                "Two runs with the same noise on data sets that differ in one example: the largest mean difference of "
                f"their losses (points, {self.pairs} pairs, bars of one standard error) and the bound of Theorem 3.10 "
                "(dashed), for subspaces of s dimensions and step sizes C/t."
            ),
            "bounds_lemmas": (
                "Every line that was measured, with its number in the paper: measured over stated value. Left: "
                "statements of the paper; right: steps of its proofs, and below them, shaded, replacements of "
                "ours. Circles are "
                "equalities and triangles are bounds; hollow vermilion marks fail."
            ),
        }

    def measure(self, run: Runner) -> Frames:
        last = self.stabilities[-1]
        done = run(
            [
                *(functools.partial(stability.apart, setting, self.pairs) for setting in self.stabilities),
                functools.partial(rate.corrected_on_random, self.quadratics),
                *(functools.partial(rate.against_bound, setting, self.seeds) for setting in self.rates),
                functools.partial(lemmas, self.draws),
                functools.partial(rate.counterexamples),
            ]
        )
        count = len(self.stabilities)
        apart = done[count - 1].iloc[-1]
        checks: list[Check] = done[-2]
        checks += run([functools.partial(stability_checks, last, self.pairs, self.sets, apart.measured, apart.error)])[
            0
        ]
        order = [f"3.{i}" for i in range(1, 11)] + [f"B.{i}" for i in range(1, 13)] + ["C.1", "C.2"]
        checks.sort(key=lambda check: order.index(check.number))
        return {
            "bounds_rate": pandas.concat(done[count + 1 : -2], ignore_index=True),
            "bounds_counterexamples": done[-1],
            "bounds_corrected": done[count],
            "bounds_stability": pandas.concat(done[:count], ignore_index=True),
            "bounds_lemmas": DataFrame([_row(check) for check in checks]),
        }

    def draw(self, frames: Frames) -> dict[str, Figure]:
        return {
            "bounds_rate": _rate(frames["bounds_rate"], frames["bounds_counterexamples"], frames["bounds_corrected"]),
            "bounds_stability": _stability(frames["bounds_stability"]),
            "bounds_lemmas": _lemmas(frames["bounds_lemmas"]),
        }


def _shade(axes: Axes, top: float) -> None:
    """Mark the region above 1, in which the bound is violated."""
    axes.axhspan(1, top, color=VIOLATED, alpha=0.15, linewidth=0)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.annotate("bound violated", (0.98, 1), (0, 3), xycoords=("axes fraction", "data"), ha="right", fontsize=6.5,
                  textcoords="offset points", color="#9B4F7F")  # fmt: skip


def _rate(frame: DataFrame, counter: DataFrame, corrected: DataFrame) -> Figure:
    drawn, (left, middle, right) = figure.sheet(figure.WIDE, 2.9, 1, 3)
    sizes = sorted(frame.s.unique())
    for colour, s in zip(figure.sequence(len(sizes)), sizes, strict=True):
        mine = frame[frame.s == s]
        left.plot(mine["T"], mine.ratio, color=colour, label=f"s = {s}")
        left.fill_between(mine["T"], mine.ratio - mine.ratio_error, mine.ratio + mine.ratio_error, color=colour,
                          alpha=0.25, linewidth=0)  # fmt: skip
        left.plot(mine["T"], mine.measured / mine.corrected, color=colour, linestyle="--", linewidth=0.9)
    left.plot([], [], color=figure.GREY, label="Theorem 3.3")
    left.plot([], [], color=figure.GREY, linestyle="--", linewidth=0.9, label="corrected")
    _shade(left, 12)
    left.set(xscale="log", yscale="log", xlabel="steps T", ylabel=r"mean $\|\nabla L\|^2$ / bound", ylim=(0.15, 12),
             title=f"quadratic, d = {frame.d.iloc[0]}")  # fmt: skip
    left.legend(loc="upper left", ncols=2, columnspacing=0.8, handletextpad=0.4)
    figure.plain_ticks(left.yaxis, (0.2, 0.5, 1, 2, 5, 10))
    last = frame[frame["T"] == frame["T"].max()]
    _shade(middle, 200)
    grid = np.geomspace(1.5, 800, 20)
    middle.plot(grid, grid / 8, color=figure.GREY, linestyle=":", label="d/(8s)")
    middle.errorbar(last.d / last.s, last.ratio, last.ratio_error, fmt="o", color=figure.MEASURED, markersize=4,
                    label="quadratic")  # fmt: skip
    for kind, marker, colour in (("linear", "x", "black"), ("pseudo-Huber", "s", figure.BOUND)):
        mine = counter[counter.loss == kind]
        middle.errorbar(mine.d_over_s, mine.ratio, mine.ratio_error, fmt=marker, color=colour, markersize=5,
                        markerfacecolor="none", label=kind)  # fmt: skip
    middle.set(xscale="log", yscale="log", xlabel="d / s", ylim=(0.15, 200), title="over Theorem 3.3")
    middle.legend(loc="upper left")
    figure.plain_ticks(middle.yaxis, (0.2, 1, 4, 16, 64))
    figure.plain_ticks(middle.xaxis, (2, 8, 32, 128, 512))
    _shade(right, 1.2)
    names = list(dict.fromkeys(corrected.ensemble))
    for i, name in enumerate(names):
        mine = corrected[corrected.ensemble == name]
        colour = figure.COLOURS.get(name, figure.GREY)
        jitter = np.linspace(-0.25, 0.25, len(mine))
        right.errorbar(i + jitter, mine.ratio, mine.ratio_error, fmt="o", color=colour, markersize=2, linewidth=0.5)
    right.set_xticks(range(len(names)), [name.replace("sparse (Bernoulli)", "Bernoulli") for name in names],
                     rotation=50, ha="right")  # fmt: skip
    right.set(ylim=(0, 1.2), title="over the corrected bound")
    right.grid(axis="x", visible=False)
    figure.panels([left, middle, right])
    return drawn


def _stability(frame: DataFrame) -> Figure:
    rates = sorted(frame.C.unique())
    drawn, grid = figure.sheet(figure.WIDE, 2.7, 1, len(rates), squeeze=False, sharey=True)
    for axes, c in zip(grid[0], rates, strict=True):
        part = frame[c == frame.C]
        sizes = sorted(part.s.unique())
        for colour, marker, s in zip(figure.sequence(len(sizes)), "osD", sizes, strict=False):
            mine = part[part.s == s]
            axes.plot(mine["T"], mine.bound, color=colour, linestyle="--", linewidth=0.9)
            axes.errorbar(mine["T"], mine.measured, mine.error, fmt=f"{marker}-", color=colour, markersize=3,
                          capsize=1.5, label=f"s = {s}")  # fmt: skip
        axes.plot([], [], color=figure.GREY, linestyle="--", linewidth=0.9, label="Theorem 3.10")
        axes.set(xscale="log", yscale="log", xlabel="steps T", title=f"step size {c:g}/t")
        axes.set_ylim(frame.measured.min() / 3, 60 * frame.bound.max())
        axes.tick_params(labelleft=True)
        axes.legend(loc="upper left", ncols=2, columnspacing=0.8)
    grid[0][0].set_ylabel("difference of the two runs' losses")
    figure.panels(list(grid[0]))
    return drawn


def _lemmas(frame: DataFrame) -> Figure:
    claims = frame[frame.role == Role.CLAIM]
    others = pandas.concat([frame[frame.role == Role.STEP], frame[frame.role == Role.OURS]])
    rows = max(len(claims), len(others))
    drawn, (left, right) = figure.sheet(figure.WIDE, 0.155 * rows + 0.9, 1, 2)
    low, high = 1e-3, 300.0
    for axes, part, title in ((left, claims, "statements"), (right, others, "steps of proofs; shaded: ours")):
        for i, row in enumerate(part.itertuples()):
            colour = figure.MEASURED if row.holds else figure.BOUND
            x = min(max(row.ratio, low * 1.3), high / 1.3)
            if row.role == Role.OURS:
                axes.axhspan(i - 0.5, i + 0.5, color=figure.COLOURS["block-sparse"], alpha=0.12, linewidth=0)
            axes.plot(x, i, "o" if row.relation == "=" else "<", color=colour, markersize=3.5,
                      markerfacecolor=colour if row.holds else "white")  # fmt: skip
            number = _number(row.ratio)
            axes.annotate(
                number, (1.02, i), xycoords=("axes fraction", "data"), va="center", fontsize=6.5, color=colour
            )
        labels = [f"{row.number}  {row.label}" for row in part.itertuples()]
        axes.set_yticks(range(len(part)), labels, fontsize=6.5)
        axes.axvline(1, color="black", linewidth=0.8, zorder=0)
        axes.set(xscale="log", xlabel="measured / stated", xlim=(low, high), ylim=(rows - 0.4, -0.6), title=title)
        axes.grid(axis="y", visible=False)
    key = [
        Line2D([], [], marker="o", linestyle="", color=figure.MEASURED, label="equality, holds"),
        Line2D([], [], marker="<", linestyle="", color=figure.MEASURED, label="bound, holds"),
        Line2D([], [], marker="<", linestyle="", color=figure.BOUND, markerfacecolor="white", label="fails"),
    ]
    drawn.legend(handles=key, loc="outside upper center", ncols=3)
    return drawn


def _number(ratio: float) -> str:
    if math.isinf(ratio):
        return "∞"
    if ratio >= 1e4:
        return f"$10^{{{math.log10(ratio):.0f}}}$"
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.2g}"
