"""Alignment by depth on a model, at the start and along an adaptive run, beside the schedule's probabilities."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame
from torch import nn

from ..block import Partition, layers
from ..errors import ZeroBlockError
from ..journal import Record
from ..method import mezo_bcd_adaptive
from ..schedule import Adaptive
from . import figure, model
from .model import Closure, Estimate, Measure
from .runner import Runner
from .study import Frames


@dataclasses.dataclass(frozen=True)
class Depth:
    """Every block, measured at some steps of a MeZO-BCD run with the adaptive schedule.

    Args:
        module: the model; it is trained.
        held: the batches to measure on, which the run does not see.
        batches: the batches of the run, one per step.
        partition: into blocks.
        at: steps at which to measure, ascending from 0.
        lr, eps: of the run.
        schedule: of the run.
        ways: "backward", "forward" or both.
        probes: random vectors per trace.
        iterations: of Lanczos.
        sketch: vectors of the forward bracket of λmax; 0 for none.
        subject: the model and task, as figures name them.
    """

    module: nn.Module
    held: Sequence[Closure]
    batches: Iterable[Closure]
    partition: Partition = layers
    at: tuple[int, ...] = (0,)
    lr: float = 3e-4
    eps: float = 1e-3
    schedule: Adaptive = dataclasses.field(default_factory=Adaptive)
    ways: tuple[str, ...] = ("backward",)
    probes: int = 4
    iterations: int = 6
    sketch: int = 0
    seed: int = 0
    subject: str = ""
    records: list[Record] = dataclasses.field(default_factory=list)
    """The run's steps; ``measure`` fills it."""

    name = "blocks"
    tables = ("blocks",)

    def __post_init__(self) -> None:
        if not self.at or self.at[0] != 0 or list(self.at) != sorted(set(self.at)):
            raise ZeroBlockError("the steps to measure at must ascend from 0")

    @property
    def jobs(self) -> int:
        return len(self.at) * len(self.ways) * len(self.partition(self.module)) + self.at[-1]

    @property
    def captions(self) -> dict[str, str]:
        captions = {
            "blocks": (
                f"{self.subject}: (a) the subspace alignment ρ_B = Tr(H_B)/λmax(H) of each block from input to output, "
                "at the start and along a MeZO-BCD run with the adaptive schedule (the axis is linear near zero and "
                "logarithmic beyond); (b) the squared gradient norm; (c) the probabilities that the schedule "
                "has learnt "
                "by then; (d) the share of the steps that each block has taken. Bars are one standard error."
            )
        }
        if len(self.ways) > 1:
            captions["blocks_agreement"] = (
                f"{self.subject}: trace, squared gradient norm and coefficient variance of each block, by "
                "Hessian-vector products and by forward passes alone; on the diagonal they agree."
            )
        return captions

    def measure(self, run: Runner) -> Frames:
        optimizer = mezo_bcd_adaptive(
            self.module, self.lr, self.eps, partition=self.partition, schedule=self.schedule, seed=self.seed
        )
        rows: list[dict[str, Any]] = []
        batches = iter(self.batches)
        visits = [0] * len(optimizer.blocks)
        for stop in self.at:
            while optimizer.steps < stop:
                optimizer.step(next(batches))
                assert optimizer.record is not None
                self.records.append(optimizer.record)
                visits[optimizer.record.block] += 1
                run.tick()
            p = self.schedule.probabilities(optimizer.scores)
            for way in self.ways:
                measures, top = self._measured(way, run)
                for i, block in enumerate(measures):
                    rows.append(
                        {"step": stop, "way": way, "block": i, "probability": p[i], "visits": visits[i]}
                        | _flat(block, top)
                    )
        return {"blocks": DataFrame(rows)}

    def _measured(self, way: str, run: Runner) -> tuple[list[Measure], Estimate]:
        if way == "backward":
            measures = model.backward(
                self.module, self.held, self.partition, probes=self.probes, iterations=self.iterations, seed=self.seed,
                tick=run.tick,
            )  # fmt: skip
            return measures, model.top(self.module, self.held, iterations=self.iterations, seed=self.seed)
        if way != "forward":
            raise ZeroBlockError(f"a model is measured backward or forward, not {way!r}")
        measures = model.forward(
            self.module, self.held, self.partition, probes=self.probes, sketch=self.sketch, eps=self.eps,
            seed=self.seed, tick=run.tick,
        )  # fmt: skip
        known = [m.top for m in measures if math.isfinite(m.top.value)]
        # λmax(H) is at least that of every block; forward passes alone give no better bound
        return measures, max(known, key=lambda e: e.value) if known else Estimate(math.nan, math.nan)

    def draw(self, frames: Frames) -> dict[str, Figure]:
        frame = frames["blocks"]
        drawn = {"blocks": _by_depth(frame[frame.way == self.ways[0]], self.subject)}
        if len(self.ways) > 1:
            drawn["blocks_agreement"] = _agreement(frame)
        return drawn


def _flat(block: Measure, top: Estimate) -> dict[str, Any]:
    row: dict[str, Any] = {"name": block.name, "size": block.size}
    rho = block.trace.over(top)
    for name, estimate in (
        ("trace", block.trace), ("top", block.top), ("rho", rho), ("gradient", block.gradient),
        ("variance", block.variance), ("model_top", top),
    ):  # fmt: skip
        row |= {name: estimate.value, f"{name}_error": estimate.error}
    return row


def _by_depth(frame: DataFrame, subject: str) -> Figure:
    drawn, grid = figure.sheet(figure.WIDE, 4.4, 2, 2, sharex=True)
    rho, gradient, chance, visits = grid.flat
    steps = sorted(frame.step.unique())
    known = bool(frame.rho.notna().any())
    value, name = (
        ("rho", r"$\rho_B = \mathrm{Tr}(H_B)/\lambda_{\max}(H)$") if known else ("trace", r"$\mathrm{Tr}(H_B)$")
    )
    gradient.set_yscale("log")
    for colour, marker, step in zip(figure.sequence(len(steps)), "osD^v<>" * len(steps), steps, strict=False):
        mine = frame[frame.step == step]
        look = {
            "color": colour,
            "markersize": 2.5,
            "linewidth": 0.8,
            "label": "start" if step == 0 else f"step {step:,}",
        }
        rho.errorbar(mine.block, mine[value], mine[f"{value}_error"].fillna(0.0), fmt=f"{marker}-", capsize=1.5, **look)
        low = np.minimum(mine.gradient_error.fillna(0.0), 0.9 * mine.gradient)  # a log axis has no zero
        gradient.errorbar(mine.block, mine.gradient, low, fmt=f"{marker}-", capsize=1.5, **look)
        chance.plot(mine.block, mine.probability, f"{marker}-", **look)
        if step:
            visits.plot(mine.block, mine.visits / max(1, mine.visits.sum()), f"{marker}-", **look)
    # most blocks lie near zero and a few far from it: linear up to the median size, logarithmic beyond
    typical = float(np.nanmedian(frame[value].abs()))
    if typical > 0:
        decade = math.ceil(math.log10(typical))
        rho.set_yscale("symlog", linthresh=10.0**decade, linscale=1)
        powers = [10.0**k for k in range(decade, decade + 8)]
        low, high = rho.get_ylim()
        rho.set_yticks([t for t in (0.0, *powers, *(-x for x in powers)) if low <= t <= high])
        rho.minorticks_off()
    rho.axhline(0, color=figure.GREY, linewidth=0.6)
    rho.set(ylabel=name, title="alignment")
    gradient.set(ylabel=r"$\|\nabla_B L\|^2$", title="squared gradient norm")
    blocks = frame.block.nunique()
    for axes, title in ((chance, "probability in the adaptive schedule"), (visits, "share of the steps taken")):
        axes.axhline(1 / blocks, color=figure.GREY, linestyle=":", linewidth=0.9)
        axes.set(yscale="log", ylim=(1e-4, 1.5), title=title, ylabel=title.split()[0])
    chance.annotate("uniform", (1, 1 / blocks), (-2, 2), xycoords=("axes fraction", "data"), ha="right", fontsize=6.5,
                    textcoords="offset points", color=figure.GREY)  # fmt: skip
    for axes in (chance, visits):
        axes.set_xlabel("block, from input to output")
    figure.panels([rho, gradient, chance, visits])
    handles, labels = gradient.get_legend_handles_labels()
    drawn.legend(
        handles, labels, loc="outside upper center", ncols=min(6, len(labels)), title=subject or None, title_fontsize=7
    )
    return drawn


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
