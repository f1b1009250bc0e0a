"""Convergence against alignment, at one fixed learning rate and at each alignment's own."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame

from ..errors import ZeroBlockError
from . import figure
from .alignment import expected_controlled
from .batched import AlignedDirections, Runs, descend_all
from .quadratic import hessian
from .runner import Runner
from .study import Frames

GAMMAS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""The shares of eigenvectors in the paper's experiment."""

SHOWN = (0.0, 0.2, 0.5, 1.0)
"""The shares whose loss curves and learning rates are drawn."""

FACTORS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
"""Learning rates of the sweep, in units of 1/(L(ρ̄ + 2))."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """Fits of steps = slope/ρ̄: a line through the origin, and a line with an intercept.

    Args:
        slope: the slope of the line through the origin.
        r2: its R² about the mean.
        free: slope, intercept and R² of the line with an intercept.
    """

    slope: float
    r2: float
    free: tuple[float, float, float]

    @classmethod
    def of(cls, inverse: Any, steps: Any) -> Fit:
        """Least squares of steps on 1/ρ̄, both (n,)."""
        x, y = np.asarray(inverse, dtype=float), np.asarray(steps, dtype=float)
        if len(x) < 3 or np.ptp(x) == 0:
            raise ZeroBlockError("a fit needs at least three different alignments")
        total = float(((y - y.mean()) ** 2).sum())
        slope = float(x @ y / (x @ x))
        steep, intercept = (float(v) for v in np.polyfit(x, y, 1))
        r2 = 1 - float(((y - slope * x) ** 2).sum()) / total
        return cls(slope, r2, (steep, intercept, 1 - float(((y - steep * x - intercept) ** 2).sum()) / total))


@dataclasses.dataclass(frozen=True)
class Convergence:
    """Left and middle panels of the paper's first figure, and the same experiment over learning rates.

    Args:
        dim, rank: size and rank of the dense Hessian, whose eigenvalues fall linearly from 10 to 1.
        s: dimensions of the subspace.
        lr: the fixed learning rate of the paper.
        target: the loss to reach, relative to the start.
        steps: maximum number of steps.
        seeds: runs per learning rate.
        gammas: shares of eigenvectors of H among the columns of the subspace.
    """

    dim: int = 256
    rank: int = 64
    s: int = 64
    lr: float = 1e-3
    target: float = 0.02
    steps: int = 4000
    seeds: int = 24
    gammas: tuple[float, ...] = GAMMAS

    name = "convergence"
    tables = ("convergence", "convergence_curves", "convergence_fit")

    @property
    def jobs(self) -> int:
        return len(self.gammas)

    @property
    def captions(self) -> dict[str, str]:
        return {
            "convergence": (
                f"Subspace ZO-SGD on a quadratic (d = {self.dim}, rank {self.rank}, s = {self.s}, {self.seeds} seeds): "
                f"(a) at the fixed learning rate {self.lr:g} a better aligned subspace descends faster; (b) the "
                f"steps to "
                f"{self.target:.0%} of the initial loss then fall as 1/ρ̄, but at each alignment's own largest step of "
                "the corrected bound, 1/(L(ρ̄+2)), they hardly change; (c) the whole range of learning rates. Bands and "
                "bars are one standard error."
            )
        }

    def run_gamma(self, gamma: float) -> tuple[float, Runs]:
        """E[ρ] and the runs of one γ: first the fixed learning rate, then the sweep."""
        h = hessian(self.dim, self.rank)
        chosen = math.ceil(round(self.s * gamma, 9))
        rho = expected_controlled(h, self.s, chosen)
        own = 1 / (h.top * (rho + 2))
        runs = descend_all(
            h, AlignedDirections(h.vectors[0], self.rank, self.s, chosen), lrs=(self.lr, *(f * own for f in FACTORS)),
            steps=self.steps, seeds=self.seeds, target=self.target, points=200,
        )  # fmt: skip
        return rho, runs

    def measure(self, run: Runner) -> Frames:
        if len(set(self.gammas)) < 3:
            raise ZeroBlockError("the study needs at least three values of gamma, to fit a line")
        results = run([functools.partial(self.run_gamma, gamma) for gamma in self.gammas])
        rows, curves = [], []
        for gamma, (rho, runs) in zip(self.gammas, results, strict=True):
            for i, lr in enumerate(runs.lrs):
                reached = runs.reached[i][~np.isnan(runs.reached[i])]
                rows.append(
                    {
                        "gamma": gamma, "mean_rho": rho, "kind": "fixed" if i == 0 else "own",
                        "factor": math.nan if i == 0 else FACTORS[i - 1], "lr": lr, "seeds": self.seeds,
                        "reached": len(reached) / self.seeds, "steps": reached.mean() if len(reached) else math.nan,
                        "steps_error": reached.std(ddof=1) / math.sqrt(len(reached)) if len(reached) > 1 else 0.0,
                    }
                )  # fmt: skip
            if gamma in SHOWN:
                for j, step in enumerate(runs.steps):
                    loss = np.log(runs.loss[0, :, j])  # of the fixed learning rate
                    if np.isnan(loss).any():
                        break
                    curves.append({"gamma": gamma, "mean_rho": rho, "step": step, "loss": float(np.exp(loss.mean())),
                                   "relative_error": loss.std(ddof=1) / math.sqrt(self.seeds)})  # fmt: skip
        frame = DataFrame(rows)
        fixed = frame[frame.kind == "fixed"]
        fit = Fit.of(1 / fixed.mean_rho, fixed.steps)
        fits = DataFrame(
            [
                {"line": "through the origin", "slope": fit.slope, "intercept": 0.0, "r2": fit.r2},
                {"line": "free", "slope": fit.free[0], "intercept": fit.free[1], "r2": fit.free[2]},
            ]
        )
        return {"convergence": frame, "convergence_curves": DataFrame(curves), "convergence_fit": fits}

    def draw(self, frames: Frames) -> dict[str, Figure]:
        frame, curves, fits = (frames[name] for name in self.tables)
        drawn, (left, middle, right) = figure.sheet(figure.WIDE, 2.7, 1, 3)
        shown = [g for g in SHOWN if g in set(frame.gamma)]
        colours = dict(zip(shown, figure.sequence(len(shown)), strict=True))
        for gamma, colour in colours.items():
            curve, sweep = curves[curves.gamma == gamma], frame[(frame.gamma == gamma) & (frame.kind == "own")]
            label = rf"$\bar\rho$ = {curve.mean_rho.iloc[0]:.1f}"
            left.plot(curve.step, curve.loss, color=colour, label=label)
            spread = np.exp(curve.relative_error)
            left.fill_between(
                curve.step, curve.loss / spread, curve.loss * spread, color=colour, alpha=0.2, linewidth=0
            )
            sweep = sweep[sweep.reached == 1]
            right.errorbar(
                sweep.lr, sweep.steps, sweep.steps_error, fmt="o-", color=colour, markersize=2.5, capsize=1.5
            )
        left.axhline(self.target, color=figure.GREY, linestyle=":", linewidth=0.9)
        left.set(yscale="log", xlabel="step", ylabel="loss / initial loss", title=f"fixed lr {self.lr:g}",
                 xlim=(0, self.steps / 2), ylim=(self.target / 4, 1.3))  # fmt: skip
        fixed = frame[frame.kind == "fixed"]
        own = frame[frame.factor == 1.0]
        middle.errorbar(fixed.mean_rho, fixed.steps, fixed.steps_error, fmt="o", color=figure.MEASURED, markersize=3,
                        capsize=1.5, label=f"fixed lr {self.lr:g}")  # fmt: skip
        grid = np.linspace(fixed.mean_rho.min(), fixed.mean_rho.max(), 50)
        slope = float(fits[fits.line == "through the origin"].slope.iloc[0])
        middle.plot(grid, slope / grid, color=figure.MEASURED, linewidth=0.8, label=r"$\propto 1/\bar\rho$")
        middle.errorbar(own.mean_rho, own.steps, own.steps_error, fmt="s", color=figure.BOUND, markersize=3,
                        capsize=1.5, label=r"lr $1/(L(\bar\rho+2))$")  # fmt: skip
        middle.set(xlabel=r"mean alignment $\bar\rho$", ylabel=f"steps to {self.target:.0%} of the loss", ylim=(0,
                   None), xlim=(0, None), title="fixed against own lr")  # fmt: skip
        middle.legend(loc="upper right")
        right.axvline(self.lr, color=figure.GREY, linestyle=":", linewidth=0.9)
        right.annotate("fixed lr", (self.lr, 0), (-2, 3), xycoords=("data", "axes fraction"), ha="right", rotation=90,
                       textcoords="offset points", fontsize=6.5, color=figure.GREY)  # fmt: skip
        right.set(xscale="log", yscale="log", xlabel="learning rate", ylabel=f"steps to {self.target:.0%} of the loss",
                  title="every lr")  # fmt: skip
        figure.plain_ticks(right.yaxis, (250, 500, 1000, 2000))
        figure.panels([left, middle, right])
        handles, labels = left.get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside upper center", ncols=len(labels), title="panels (a) and (c)")
        return {"convergence": drawn}
