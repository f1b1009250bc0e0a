"""Convergence against alignment: loss curves by γ, and iterations to a target against 1/ρ̄."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame

from ..errors import ZeroBlockError
from . import figure
from .descent import Trace, descend
from .projection import Controlled
from .quadratic import hessian
from .runner import Runner
from .study import Frames

LEFT = (0.0, 0.2, 0.4, 0.7, 1.0)
MIDDLE = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclasses.dataclass(frozen=True)
class Fit:
    """iterations = slope/ρ̄, a line through the origin, and one with an intercept.

    Args:
        slope: of the line through the origin.
        r2: its R², about the mean.
        free: slope, intercept and R² of the line with an intercept.
    """

    slope: float
    r2: float
    free: tuple[float, float, float]

    @classmethod
    def of(cls, inverse: Any, iterations: Any) -> Fit:
        """Least squares of iterations on 1/ρ̄, both (n,)."""
        x, y = np.asarray(inverse, dtype=float), np.asarray(iterations, dtype=float)
        if len(x) < 3 or np.ptp(x) == 0:
            raise ZeroBlockError("a fit needs at least three different alignments")
        total = float(((y - y.mean()) ** 2).sum())
        slope = float(x @ y / (x @ x))
        steep, intercept = (float(v) for v in np.polyfit(x, y, 1))
        r2 = 1 - float(((y - slope * x) ** 2).sum()) / total
        return cls(slope, r2, (steep, intercept, 1 - float(((y - steep * x - intercept) ** 2).sum()) / total))


def _run(dim: int, rank: int, s: int, lr: float, eps: float, gamma: float, seed: int, **limits: Any) -> Trace:
    h = hessian(dim, rank, seed=seed)
    return descend(h, Controlled(s, gamma), lr=lr, eps=eps, seed=seed, **limits)


@dataclasses.dataclass(frozen=True)
class Convergence:
    """Left and middle panels of the paper's first figure.

    One run serves both: the left panel is the first ``short`` steps of the middle's, and a run ends when it
    has reached the target, which is the lowest loss of γ = 0 after ``long`` steps.  The others may take longer than
    that: γ = 0.05 does where chance favoured γ = 0.
    """

    dim: int = 256
    rank: int = 64
    s: int = 64
    lr: float = 1e-3
    eps: float = 1e-4
    short: int = 1000
    long: int = 10_000
    seeds: int = 3
    left: tuple[float, ...] = LEFT
    gammas: tuple[float, ...] = MIDDLE

    name = "convergence"
    tables = ("convergence", "convergence_curves", "convergence_fit")

    @property
    def jobs(self) -> int:
        return self.seeds * len(self.gammas)

    @property
    def captions(self) -> dict[str, str]:
        return {
            "convergence": (
                f"Subspace ZO-SGD on a quadratic (d = {self.dim}, rank {self.rank}, s = {self.s}, lr {self.lr:g}, eps "
                f"{self.eps:g}, {self.seeds} seeds, bands of one standard deviation): (a) the more eigenvectors of the "
                "Hessian the subspace holds, the faster the loss falls; (b) the steps to reach the lowest loss that "
                f"γ = 0 reaches in {self.long:,} are proportional to 1/ρ̄."
            )
        }

    def measure(self, run: Runner) -> Frames:
        if self.gammas[0] != 0.0 or not set(self.left) <= set(self.gammas):
            raise ZeroBlockError("gammas must start with 0, which sets the target, and hold those of the left panel")
        setting = (self.dim, self.rank, self.s, self.lr, self.eps)
        seeds = range(self.seeds)
        slowest = run([functools.partial(_run, *setting, 0.0, seed, steps=self.long) for seed in seeds])
        targets = [float(trace.loss.min()) for trace in slowest]
        keys = [(gamma, seed) for gamma in self.gammas[1:] for seed in seeds]
        others = run(
            [
                functools.partial(
                    _run, *setting, gamma, seed, steps=2 * self.long, target=targets[seed], at_least=self.short
                )
                for gamma, seed in keys
            ]
        )
        traces = {(0.0, seed): trace for seed, trace in enumerate(slowest)} | dict(zip(keys, others, strict=True))
        rows, curves = [], []
        for (gamma, seed), trace in traces.items():
            reached = np.flatnonzero(trace.loss <= targets[seed])
            if not len(reached):
                raise ZeroBlockError(f"γ = {gamma:g}, seed {seed} did not reach the target in {2 * self.long} steps")
            rows.append(
                {
                    "gamma": gamma, "seed": seed, "mean_rho": trace.mean_rho, "max_rho": trace.max_rho,
                    "target": targets[seed], "iterations": int(reached[0]),
                    "iterations_x_rho": int(reached[0]) * trace.mean_rho,
                }
            )  # fmt: skip
            if gamma in self.left:
                every = max(1, self.short // 200)
                for step in range(0, self.short + 1, every):
                    curves.append({"gamma": gamma, "seed": seed, "step": step, "loss": trace.loss[step],
                                   "mean_rho": trace.mean_rho})  # fmt: skip
        frame = DataFrame(rows)
        mean = frame.groupby("gamma").mean(numeric_only=True)
        fit = Fit.of(1 / mean.mean_rho, mean.iterations)
        fits = DataFrame(
            [
                {"line": "through the origin", "slope": fit.slope, "intercept": 0.0, "r2": fit.r2},
                {"line": "free", "slope": fit.free[0], "intercept": fit.free[1], "r2": fit.free[2]},
            ]
        )
        return {"convergence": frame, "convergence_curves": DataFrame(curves), "convergence_fit": fits}

    def draw(self, frames: Frames) -> dict[str, Figure]:
        drawn, (left, middle) = figure.sheet(figure.WIDE, 2.5, 1, 2)
        curves, points, fits = (frames[n] for n in self.tables[1:2] + self.tables[:1] + self.tables[2:])
        left.set_yscale("log")
        gammas = sorted(curves.gamma.unique())
        for colour, gamma in zip(figure.sequence(len(gammas)), gammas, strict=True):
            mine = curves[curves.gamma == gamma]
            rows = mine.pivot(index="seed", columns="step", values="loss")
            label = rf"$\gamma$ = {gamma:g},  $\bar\rho$ = {mine.mean_rho.mean():.1f}"
            figure.band(left, rows.columns, rows.to_numpy(), colour, label)
        left.set(xlabel="step", ylabel="loss")
        left.legend()
        grouped = points.groupby("gamma")
        x, y = 1 / grouped.mean_rho.mean(), grouped.iterations.mean()
        spread = grouped.iterations.std().fillna(0.0)
        colours = figure.sequence(len(x))
        for xi, yi, si, colour in zip(x, y, spread, colours, strict=True):
            middle.errorbar(xi, yi, si, fmt="o", color=colour, markersize=4, capsize=2, linewidth=0.8)
        line = fits[fits.line == "through the origin"].iloc[0]
        grid = np.array([0, float(x.max()) * 1.05])
        label = f"{line.slope:,.0f} / " + rf"$\bar\rho$,  $R^2$ = {line.r2:.4f}"
        middle.plot(grid, line.slope * grid, color=figure.BOUND, linestyle="--", label=label, zorder=0)
        middle.set(xlabel=r"$1/\bar\rho$", ylabel="iterations to target", xlim=(0, None), ylim=(0, None))
        middle.legend(loc="upper left")
        figure.panels([left, middle])
        return {"convergence": drawn}
