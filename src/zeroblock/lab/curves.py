"""Loss curves of the three projections at the same s."""

from __future__ import annotations

import dataclasses
import functools

from matplotlib.figure import Figure
from pandas import DataFrame

from . import figure
from .descent import Trace, descend
from .distribution import SIZES
from .projection import THREE
from .quadratic import heterogeneous
from .runner import Runner
from .study import Frames


def _run(dim: int, rank: int, blocks: int, kind: int, s: int, lr: float, eps: float, steps: int, seed: int) -> Trace:
    h = heterogeneous(dim, rank, blocks, seed=0)
    return descend(h, THREE[kind](s), lr=lr, eps=eps, steps=steps, seed=seed, origin=0)


@dataclasses.dataclass(frozen=True)
class Curves:
    """The paper's supplementary loss curves: comparable at the same s, whatever the structure of M."""

    dim: int = 1024
    rank: int = 16
    blocks: int = 16
    sizes: tuple[int, ...] = SIZES
    lr: float = 1e-4
    eps: float = 1e-4
    steps: int = 1000
    seeds: int = 3

    name = "curves"
    tables = ("curves",)

    @property
    def jobs(self) -> int:
        return len(self.sizes) * len(THREE) * self.seeds

    @property
    def captions(self) -> dict[str, str]:
        return {
            "curves": (
                f"Loss against steps at lr {self.lr:g} for each s (d = {self.dim}, rank {self.rank} a block, "
                f"{self.seeds} seeds from one start, bands of one standard deviation): with M drawn at random the "
                "three projections converge alike, as their equal ρ̄ predicts."
            )
        }

    def measure(self, run: Runner) -> Frames:
        keys = [  # the slowest first, so that no worker waits at the end
            (s, kind, seed) for s in sorted(self.sizes, reverse=True) for kind in range(len(THREE))
            for seed in range(self.seeds)
        ]  # fmt: skip
        setting = (self.dim, self.rank, self.blocks)
        traces = run(
            [functools.partial(_run, *setting, kind, s, self.lr, self.eps, self.steps, seed) for s, kind, seed in keys]
        )
        every = max(1, self.steps // 100)
        rows = [
            {"s": s, "projection": THREE[kind].label, "seed": seed, "step": step, "loss": trace.loss[step],
             "mean_rho": trace.mean_rho}
            for (s, kind, seed), trace in zip(keys, traces, strict=True)
            for step in range(0, self.steps + 1, every)
        ]  # fmt: skip
        return {"curves": DataFrame(rows)}

    def draw(self, frames: Frames) -> dict[str, Figure]:
        frame = frames["curves"]
        sizes = sorted(frame.s.unique())
        columns = min(3, len(sizes))
        count = -(-len(sizes) // columns)
        drawn, grid = figure.sheet(figure.WIDE, 2.0 * count, count, columns, sharex=True, squeeze=False)
        for axes, s in zip(grid.flat, sizes, strict=False):
            for kind in THREE:
                mine = frame[(frame.s == s) & (frame.projection == kind.label)]
                rows = mine.pivot(index="seed", columns="step", values="loss")
                label = rf"{kind.label}, $\bar\rho$ = {mine.groupby('seed').mean_rho.first().mean():.2f}"
                figure.band(axes, rows.columns, rows.to_numpy(), figure.COLOURS[kind.label], label)
            axes.set_title(f"s = {s}", loc="left")
            axes.set_ylim(0, None)
            axes.legend()
        for axes in grid[:, 0]:
            axes.set_ylabel("loss")
        for spare in list(grid.flat)[len(sizes) :]:
            spare.set_axis_off()
        for i, axes in enumerate(grid.flat):
            if i < len(sizes) and i + columns >= len(sizes):
                axes.set_xlabel("step")
                axes.tick_params(labelbottom=True)
        return {"curves": drawn}
