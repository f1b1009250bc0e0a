"""The choice of blocks: always the best one, by alignment, or every block in turn, over learning rates."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import torch
from matplotlib.figure import Figure
from pandas import DataFrame

from ..block import Block
from ..estimator import TwoSided
from ..optimizer import ZeroOrder
from ..schedule import Adaptive
from . import figure
from .alignment import block_values
from .batched import BlockDirections, Runs, descend_all
from .quadratic import Hessian, Quadratic, heterogeneous
from .runner import Runner
from .study import Frames

NAMES = {
    "uniform": "uniform, independent",
    "shuffled": "shuffled cycles",
    "proportional": r"probability $\propto \rho_B$",
    "best": r"always the largest $\rho_B$",
    "adaptive": "adaptive (ZeroOrder)",
    "own_lr": "uniform, lr per block",
}
"""Names of the schedules in figures."""

COLOURS = ("#000000", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7", "#009E73")


def directions(name: str, h: Hessian, s: int) -> BlockDirections:
    """One of the schedules, for blocks of s coordinates; "own_lr" has rates proportional to 1/(λ_B(intdim_B + 2))."""
    rho, d = block_values(h, s), h.dim
    if name == "best":
        return BlockDirections(d, s, "weighted", tuple((rho == rho.max()).double().tolist()))
    if name == "proportional":
        return BlockDirections(d, s, "weighted", tuple((rho / rho.sum()).tolist()))
    if name == "own_lr":
        tops = torch.stack([torch.linalg.eigvalsh(block)[-1] for block in _diagonal_blocks(h, s)])
        own = 1 / (rho * h.top + 2 * tops)
        return BlockDirections(d, s, scales=tuple((own / own.min()).sqrt().tolist()))
    return BlockDirections(d, s, name)


def _diagonal_blocks(h: Hessian, s: int) -> list[torch.Tensor]:
    full = torch.block_diag(*h.blocks)
    return [full[i : i + s, i : i + s] for i in range(0, h.dim, s)]


def _error(losses: np.ndarray) -> float:
    """Standard error of the mean; 0 where a run diverged or there is only one."""
    if len(losses) < 2 or not np.isfinite(losses).all():
        return 0.0
    return float(losses.std(ddof=1)) / math.sqrt(len(losses))


@dataclasses.dataclass(frozen=True)
class Schedules:
    """Block descent with several schedules on the quadratic whose blocks differ, each over learning rates.

    Args:
        dim, rank, blocks: see :func:`heterogeneous`.
        s: coordinates per block of the descent.
        lrs: learning rates; where each block has its own, the smallest of them.
        steps, seeds: steps per run, and runs per learning rate.
        adaptive_lrs, adaptive_seeds: the same for the library's adaptive schedule, which ``ZeroOrder`` runs slowly.
    """

    dim: int = 1024
    rank: int = 16
    blocks: int = 16
    s: int = 64
    lrs: tuple[float, ...] = (5e-5, 1e-4, 2e-4, 3e-4, 4e-4, 5.5e-4, 7e-4, 8.5e-4, 1e-3)
    steps: int = 4000
    seeds: int = 16
    adaptive_lrs: tuple[float, ...] = (2e-4, 7e-4, 8.5e-4)
    adaptive_seeds: int = 3

    name = "schedules"
    tables = ("schedules", "schedules_curves")

    @property
    def jobs(self) -> int:
        return len(NAMES) - 1 + len(self.adaptive_lrs)

    @property
    def captions(self) -> dict[str, str]:
        return {
            "schedules": (
                f"Block descent on a quadratic of {self.dim // self.s} blocks that differ (d = {self.dim}, s = "
                f"{self.s}, "
                f"{self.seeds} seeds, bars of one standard error): (a) the loss left after {self.steps:,} steps "
                f"at every "
                "learning rate; (b) loss curves, each schedule at its own best learning rate. Always taking the "
                "block of "
                "the largest ρ leaves nearly all of the loss; preferring aligned blocks gains only where the learning "
                "rate is too small; a learning rate per block gains most."
            )
        }

    def run_batch(self, name: str) -> Runs:
        """All learning rates and seeds of one schedule."""
        h = heterogeneous(self.dim, self.rank, self.blocks)
        return descend_all(
            h, directions(name, h, self.s), lrs=self.lrs, steps=self.steps, seeds=self.seeds, seed=2, points=50
        )

    def run_adaptive(self, lr: float) -> Runs:
        """The library's adaptive schedule at one learning rate."""
        h = heterogeneous(self.dim, self.rank, self.blocks)
        recorded = np.unique(np.linspace(0, self.steps, 51).astype(int))
        losses = np.full((1, self.adaptive_seeds, len(recorded)), math.inf)
        for seed in range(self.adaptive_seeds):
            start = torch.randn(h.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 + seed))
            model = Quadratic(h, start, self.s)
            blocks = [Block(name, (name,)) for name, _ in model.named_parameters()]
            optimizer = ZeroOrder(model, lr, partition=blocks, schedule=Adaptive(), estimator=TwoSided(1e-4), seed=seed)
            initial = float(model().detach())
            for t in range(self.steps + 1):
                if t in recorded:
                    relative = float(model().detach()) / initial
                    if not relative < 1e6:
                        break
                    losses[0, seed, np.searchsorted(recorded, t)] = relative
                if t < self.steps:
                    optimizer.step(model)
        nothing = np.full(losses.shape[:2], math.nan)
        return Runs(np.array([lr]), recorded, losses, nothing, nothing, nothing)

    def measure(self, run: Runner) -> Frames:
        batched = [name for name in NAMES if name != "adaptive"]
        slow = [functools.partial(self.run_adaptive, lr) for lr in self.adaptive_lrs]
        done: list[Runs] = run([*slow, *(functools.partial(self.run_batch, name) for name in batched)])
        count = len(self.adaptive_lrs)
        nothing = np.full((count, self.adaptive_seeds), math.nan)
        together = np.concatenate([runs.loss for runs in done[:count]])
        adaptive = Runs(np.array(self.adaptive_lrs), done[0].steps, together, nothing, nothing, nothing)
        results = {"adaptive": adaptive} | dict(zip(batched, done[count:], strict=True))
        rows, curves = [], []
        for name in NAMES:
            runs = results[name]
            last = runs.loss[:, :, -1]
            mean = last.mean(1)
            error = np.array([_error(row) for row in last])
            best = int(np.argmin(mean))
            for i, lr in enumerate(runs.lrs):
                rows.append({"schedule": name, "lr": lr, "loss": mean[i], "error": error[i], "best": i == best,
                             "seeds": runs.loss.shape[1]})  # fmt: skip
            for step, loss in zip(runs.steps, runs.loss[best].mean(0), strict=True):
                curves.append({"schedule": name, "lr": runs.lrs[best], "step": step, "loss": loss})
        return {"schedules": DataFrame(rows), "schedules_curves": DataFrame(curves)}

    def draw(self, frames: Frames) -> dict[str, Figure]:
        table, curves = frames["schedules"], frames["schedules_curves"]
        drawn, (left, right) = figure.sheet(figure.WIDE, 2.8, 1, 2, sharey=True)
        for (name, label), colour, marker in zip(NAMES.items(), COLOURS, "os^vDP", strict=True):
            mine = table[(table.schedule == name) & (table.loss < 2)]
            left.errorbar(mine.lr, mine.loss, mine.error, fmt=f"{marker}-", color=colour, markersize=3, capsize=1.5,
                          label=label)  # fmt: skip
            curve = curves[curves.schedule == name]
            right.plot(curve.step, curve.loss, color=colour, label=f"{label}, lr {curve.lr.iloc[0]:g}")
        left.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="loss / initial loss", ylim=(None, 2),
                 title=f"after {self.steps:,} steps")  # fmt: skip
        right.set(xlabel="step", title="each at its best learning rate")
        right.tick_params(labelleft=True)
        figure.panels([left, right])
        handles, labels = left.get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside upper center", ncols=3)
        return {"schedules": drawn}
