"""The three projections at the same s: loss curves at a small learning rate, and the loss left at others."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame

from . import figure
from .alignment import expected
from .batched import BlockDirections, Directions, HaarDirections, Runs, SparseDirections, descend_all, mean_error
from .descent import descend
from .projection import THREE
from .quadratic import heterogeneous
from .runner import Runner
from .study import Frames

LABELS = tuple(kind.label for kind in THREE)


def _directions(label: str, d: int, s: int) -> Directions:
    if label == "low-rank":
        return HaarDirections(d, s)
    return SparseDirections(d, s) if label == "sparse" else BlockDirections(d, s)


@dataclasses.dataclass(frozen=True)
class Curves:
    """The paper's supplementary loss curves, and the same comparison over learning rates.

    Args:
        dim, rank, blocks: see :func:`heterogeneous`.
        sizes: values of s.
        lr: the learning rate of the loss curves, as in the paper.
        lrs: the learning rates of the sweep, with ``lr`` among them.
        steps, seeds: steps per run, and runs per learning rate.
        checked: steps of one run per curve by ``zeroblock.ZeroOrder``, drawn over the batched ones.
    """

    dim: int = 1024
    rank: int = 16
    blocks: int = 16
    sizes: tuple[int, ...] = (16, 64, 256)
    lr: float = 1e-4
    lrs: tuple[float, ...] = (5e-5, 1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 7e-4, 1e-3, 1.4e-3, 2e-3, 3e-3, 4e-3, 6e-3)
    steps: int = 1000
    seeds: int = 16
    checked: int = 300

    name = "curves"
    tables = ("curves", "curves_lr")

    @property
    def jobs(self) -> int:
        return 2 * len(self.sizes) * len(LABELS)

    @property
    def captions(self) -> dict[str, str]:
        return {
            "curves": (
                f"Three projections of the same s (d = {self.dim}, rank {self.rank} per block, {self.seeds} "
                f"seeds, bands "
                f"and bars of one standard error). Above: at the small learning rate {self.lr:g} they descend alike; "
                f"circles are one run each by zeroblock.ZeroOrder. Below: the loss after {self.steps:,} steps over "
                "learning rates; block-sparse diverges first, since the block with the largest ρ sets its limit."
            )
        }

    def run_batch(self, label: str, s: int) -> Runs:
        """All learning rates and seeds of one projection."""
        h = heterogeneous(self.dim, self.rank, self.blocks)
        return descend_all(
            h, _directions(label, self.dim, s), lrs=self.lrs, steps=self.steps, seeds=self.seeds, seed=1, points=50
        )

    def run_checked(self, label: str, s: int) -> np.ndarray:
        """One run by ``ZeroOrder``."""
        h = heterogeneous(self.dim, self.rank, self.blocks)
        kind = THREE[LABELS.index(label)]
        return descend(h, kind(s), lr=self.lr, eps=1e-4, steps=self.checked, seed=0)

    def measure(self, run: Runner) -> Frames:
        keys = [(s, label) for s in sorted(self.sizes, reverse=True) for label in LABELS]  # the slowest first
        singles = [functools.partial(self.run_checked, label, s) for s, label in keys]
        results = run([*singles, *(functools.partial(self.run_batch, label, s) for s, label in keys)])
        h = heterogeneous(self.dim, self.rank, self.blocks)
        curves, sweeps = [], []
        for (s, label), single, runs in zip(keys, results[: len(keys)], results[len(keys) :], strict=True):
            fixed = list(runs.lrs).index(self.lr)
            mean, error = mean_error(runs.loss[fixed], axis=0)
            for step, value, spread in zip(runs.steps, mean, error, strict=True):
                checked = single[step] / single[0] if step <= self.checked else math.nan
                curves.append({"s": s, "projection": label, "mean_rho": expected(h, s), "step": step, "loss": value,
                               "error": spread, "zero_order": checked})  # fmt: skip
            for i, lr in enumerate(runs.lrs):
                last = runs.loss[i, :, -1]
                kept = last[np.isfinite(last)]
                sweeps.append({"s": s, "projection": label, "lr": lr, "diverged": 1 - len(kept) / self.seeds,
                               "loss": kept.mean() if len(kept) == self.seeds else math.inf,
                               "error": kept.std(ddof=1) / math.sqrt(self.seeds) if len(kept) == self.seeds else 0.0,
                               })  # fmt: skip
        return {"curves": DataFrame(curves), "curves_lr": DataFrame(sweeps)}

    def draw(self, frames: Frames) -> dict[str, Figure]:
        curves, sweeps = frames["curves"], frames["curves_lr"]
        sizes = sorted(curves.s.unique())
        drawn, grid = figure.sheet(figure.WIDE, 4.0, 2, len(sizes), squeeze=False, sharey="row")
        for (above, below), s in zip(grid.T, sizes, strict=True):
            for label in LABELS:
                look = {"color": figure.COLOURS[label]}
                mine = curves[(curves.s == s) & (curves.projection == label)]
                above.plot(mine.step, mine.loss, label=label, **look)
                above.fill_between(mine.step, mine.loss - mine.error, mine.loss + mine.error, alpha=0.2, linewidth=0,
                                   **look)  # fmt: skip
                every = mine[mine.zero_order.notna()].iloc[3::4]
                above.plot(every.step, every.zero_order, "o", markerfacecolor="white", markersize=3, **look)
                sweep = sweeps[(sweeps.s == s) & (sweeps.projection == label)]
                steady = sweep.loss < 5  # the others have left the panel
                below.errorbar(sweep.lr[steady], sweep.loss[steady], sweep.error[steady], capsize=1.5, markersize=3,
                               fmt=f"{figure.MARKERS[label]}-", **look)  # fmt: skip
                if not steady.all():
                    first, last = sweep.lr[~steady].iloc[0], sweep[steady].iloc[-1]
                    below.plot([last.lr, first], [last.loss, 30], linestyle=":", **look)
            above.set(title=rf"s = {s}, $\bar\rho$ = {curves[curves.s == s].mean_rho.iloc[0]:.1f}", xlabel="step",
                      ylim=(0, 1.02))  # fmt: skip
            below.axhline(1, color=figure.GREY, linestyle=":", linewidth=0.9)
            below.axvline(self.lr, color=figure.GREY, linestyle=":", linewidth=0.9)
            below.set(xscale="log", yscale="log", xlabel="learning rate", ylim=(None, 10),
                      xlim=(min(self.lrs) / 1.2, max(self.lrs) * 1.2))  # fmt: skip
            for axes in (above, below):
                axes.tick_params(labelleft=True)
            figure.plain_ticks(below.yaxis, (0.03, 0.1, 0.3, 1, 3, 10))
        grid[0][0].set_ylabel(f"loss / initial, lr {self.lr:g}")
        grid[1][0].set_ylabel(f"loss after {self.steps:,} steps / initial")
        handles, labels = grid[0][0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside upper center", ncols=len(labels))
        return {"curves": drawn}
