"""The diagnosis of an adaptive run: selection probabilities over time, and the share of steps of each block.

Next to them are the choices that a cost-aware schedule would have made from the same coefficients.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from pandas import DataFrame

from ..errors import ZeroBlockError
from ..schedule import Economical, Schedule
from ..turn import Turns, clamped
from . import figure
from .runner import Runner
from .study import Frames

FLOOR = 1e-4
"""The smallest probability or share that figures show."""

PLAIN = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
"""Tick labels for probabilities that do not span decades."""


class Drawn(Schedule, Protocol):
    """A schedule that draws one block per turn, with probabilities that follow from the scores."""

    def probabilities(self, scores: list[float]) -> list[float]:
        """The probability of each block."""
        ...


def warmup_of(schedule: Drawn, blocks: int) -> int:
    """Turns before the first adaptive choice of a schedule; 0 if it has no warm-up."""
    turns = getattr(schedule, "warmup", 0)
    return 10 * blocks if turns is None else turns


@dataclasses.dataclass(frozen=True)
class Seen:
    """The part of a step's record that the schedule learns from."""

    step: int
    block: int
    coeffs: tuple[float, ...]


def read(path: Path) -> list[Seen]:
    """Read the steps of a run's folder, of a journal, or of a JSONL file.

    Each line of a JSONL file is an object with at least ``step``, ``block`` and ``coeffs``.  Steps must be consecutive;
    a last line that a killed run cut short is skipped.
    """
    if path.is_dir() or path.suffix == ".zbj":
        from ..journal import read as read_journal

        contents = read_journal(path)
        clip = contents.header.method.get("clip")
        taken = [Seen(record.step, record.block, clamped(record.coeffs, clip)) for record in contents.records]
        if not taken:
            raise ZeroBlockError(f"{path} holds no records")
        return taken
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ZeroBlockError(f"cannot read {path}: {error}") from error
    steps: list[Seen] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            coeffs = tuple(float(c) for c in entry["coeffs"])
            seen = Seen(int(entry["step"]), int(entry["block"]), coeffs)
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and isinstance(error, json.JSONDecodeError) and steps:
                break
            raise ZeroBlockError(
                f"{path}:{number}: a record is a JSON object with step, block and coeffs ({error})"
            ) from error
        if not coeffs or seen.block < 0:
            raise ZeroBlockError(f"{path}:{number}: a record has a block from 0 on and at least one coefficient")
        if steps and seen.step != steps[-1].step + 1:
            raise ZeroBlockError(f"{path}:{number}: step {seen.step} follows step {steps[-1].step}")
        steps.append(seen)
    if not steps:
        raise ZeroBlockError(f"{path} holds no records")
    return steps


def diagnose(
    path: Path,
    schedule: Drawn,
    blocks: int | None = None,
    interval: int = 1,
    *,
    economical: Economical | None = None,
    trajectories: int = 1000,
    every: int | None = None,
) -> Diagnosis:
    """Diagnose a run on disk.

    Args:
        path: see :func:`read`.
        schedule, blocks, interval: used for a JSONL of records; a journal has them in its header.
        economical: a schedule with the costs of the blocks; None takes the costs from the journal, where ``zeroblock
            lab blocks`` writes them.
        trajectories, every: see :class:`Diagnosis`.
    """
    steps = tuple(read(path))
    labels: tuple[str, ...] = ()
    if path.is_dir() or path.suffix == ".zbj":
        from ..journal import read as read_journal
        from ..journal.spec import build

        header = read_journal(path).header
        own = build("schedule", header.method["schedule"])
        if not hasattr(own, "probabilities") or Turns(own, len(header.blocks), 1, 0).most > 1:
            raise ZeroBlockError(f"{path} chose its blocks by {header.parts.get('schedule')}, not adaptively")
        schedule, interval = own, header.method["interval"]
        labels, blocks = header.blocks, len(header.blocks)
        costs = header.extra.get("costs")
        if economical is None and costs is not None:
            economical = Economical(tuple(map(float, costs)))
    n = max(step.block for step in steps) + 1 if blocks is None else blocks
    return Diagnosis(steps, schedule, n, labels, economical, trajectories, every, interval)


def probabilities(steps: Sequence[Seen], schedule: Drawn, n: int) -> np.ndarray:
    """The distribution that a schedule draws from before every step, (T, n), by its own functions.

    A step with a coefficient that is not finite moved nothing, so the schedule learns nothing from it.
    """
    if max(step.block for step in steps) >= n:
        raise ZeroBlockError(f"the run visits block {max(step.block for step in steps)}, but there are {n} blocks")
    turns = Turns(schedule, n, interval=1, seed=0)
    turn, rows = turns.first(), np.empty((len(steps), n))
    for t, step in enumerate(steps):
        rows[t] = schedule.probabilities(list(turn.scores))
        if np.isfinite(step.coeffs).all():
            turn = turns.observed(turn, step.block, step.coeffs)
    return rows


def shares(p: np.ndarray, trajectories: int = 1000, seed: int = 0) -> np.ndarray:
    """The share of each block in trajectories drawn from p, (T, n) → (trajectories, n).

    One uniform number per step and trajectory is looked up in the cumulative row; 1,000 trajectories of 20,000 steps
    over 27 blocks take a second or two.
    """
    if trajectories < 1 or len(p) < 1:
        raise ZeroBlockError("a simulation needs at least one trajectory of at least one step")
    generator = np.random.default_rng(seed)
    counts = np.zeros((trajectories, p.shape[1]))
    every = np.arange(trajectories)
    for row in p.cumsum(axis=1):
        picked = np.searchsorted(row[:-1], generator.random(trajectories), side="right")
        counts[every, picked] += 1
    return counts / len(p)


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The paper's two diagnostic panels for one run.

    Args:
        steps: the steps of the run.
        schedule: the schedule with the run's own parameters, such as decay and temperature.
        blocks: the number of blocks.
        labels: names of the blocks, for the table.
        economical: a schedule with the costs of steps, to compare with the run's own.
        trajectories: number of trajectories to simulate.
        every: steps averaged in one column of the heat map; by default a hundredth of the run, at most the paper's 100.
        interval: steps per turn; the schedule chooses once per turn.
        seed: the seed of the trajectories.
        subject: the run's name in the caption.
    """

    steps: tuple[Seen, ...]
    schedule: Drawn
    blocks: int
    labels: tuple[str, ...] = ()
    economical: Economical | None = None
    trajectories: int = 1000
    every: int | None = None
    interval: int = 1
    seed: int = 0
    subject: str = ""

    name = "adaptive"
    tables = ("adaptive", "adaptive_probabilities", "economical_probabilities")

    @property
    def jobs(self) -> int:
        return 1

    @property
    def captions(self) -> dict[str, str]:
        return {
            "adaptive": (
                f"Adaptive selection over {len(self.steps):,} steps{self.subject and f' of {self.subject}'}: on the "
                f"left the probability of each block on a log scale, averaged every {self._every} steps, and the "
                f"likeliest block below; on the right the share of each block in {self.trajectories:,} trajectories "
                "drawn from those probabilities (95 % band) and in the run itself (diamonds; blocks that were never "
                "taken have none)."
                + (
                    " The cost-aware schedule, from the same coefficients and the costs of steps, chose nothing here."
                    if self.economical
                    else ""
                )
            )
        }

    @property
    def _every(self) -> int:
        return self.every or max(1, min(100, len(self.steps) // 100))

    def measure(self, run: Runner) -> Frames:
        p = probabilities(self.steps, self.schedule, self.blocks)
        warmup = warmup_of(self.schedule, self.blocks)
        turns = [i for i, seen in enumerate(self.steps) if seen.step % self.interval == 0]
        learnt = [i for i in turns if self.steps[i].step // self.interval >= warmup]
        if not learnt:
            raise ZeroBlockError(
                f"the run's {len(turns)} turns all lie in the warm-up of {warmup}: there is no adaptive choice to "
                "diagnose; run longer, or give the run's own --warmup"
            )
        drawn = shares(p[learnt], self.trajectories, self.seed)
        low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
        taken = np.bincount([self.steps[i].block for i in learnt], minlength=self.blocks) / len(learnt)
        names = self.labels or tuple(f"block {i}" for i in range(self.blocks))
        table = DataFrame(
            {"block": range(self.blocks), "name": names, "mean": drawn.mean(0), "low": low, "high": high, "run": taken}
        )
        frames = {"adaptive": table, "adaptive_probabilities": self._averaged(p)}
        if self.economical is not None:
            q = probabilities(self.steps, self.economical, self.blocks)
            table["economical"] = q[learnt].mean(0)
            frames["economical_probabilities"] = self._averaged(q)
        run.tick()
        return frames

    def _averaged(self, p: np.ndarray) -> DataFrame:
        """Probabilities, (T, n), averaged over the steps of each column of the heat map."""
        cut = range(0, len(p), self._every)
        heat = DataFrame([p[i : i + self._every].mean(0) for i in cut])
        heat.columns = [f"block_{i}" for i in range(self.blocks)]
        heat.insert(0, "step", [self.steps[i].step for i in cut])
        heat["argmax"] = [int(p[min(i + self._every, len(p)) - 1].argmax()) for i in cut]
        return heat

    def draw(self, frames: Frames) -> dict[str, Figure]:
        table = frames["adaptive"]
        heats = {"adaptive schedule": frames["adaptive_probabilities"]}
        if "economical_probabilities" in frames:
            heats["cost-aware schedule"] = frames["economical_probabilities"]
        drawn = Figure(figsize=(figure.WIDE, 1.5 + 1.6 * len(heats)), layout="constrained")
        left, right = drawn.subfigures(1, 2, width_ratios=(1.35, 1), squeeze=False)[0]
        *tops, below = left.subplots(len(heats) + 1, 1, sharex=True, height_ratios=(*[3] * len(heats), 1.5))
        looks = ((figure.MEASURED, "-"), (figure.BOUND, "--"))
        for top, (title, heat), (colour, line) in zip(tops, heats.items(), looks, strict=False):
            p, edge = heat.filter(like="block_").to_numpy().T, [*heat.step, heat.step.iloc[-1] + self._every]
            # on a linear scale, a few cells near 1 would give all others the same colour
            scale = LogNorm(vmin=max(FLOOR, p.min()), vmax=p.max() + FLOOR, clip=True)
            mesh = top.pcolormesh(
                edge, np.arange(self.blocks + 1) - 0.5, p, cmap="viridis", norm=scale, rasterized=True
            )
            bar = left.colorbar(mesh, ax=top, pad=0.01, extend="min" if p.min() < FLOOR else "neither")
            if p.max() < 30 * p.min():  # less than two decades hold too few powers of ten
                figure.plain_ticks(bar.ax.yaxis, [tick for tick in PLAIN if p.min() <= tick <= p.max()])
            top.set(ylabel="block", title=f"probability, {title}" if len(heats) > 1 else "probability of each block")
            top.grid(visible=False)
            below.step([*heat.step, edge[-1]], [*heat["argmax"], heat["argmax"].iloc[-1]], line, where="post",
                       color=colour, linewidth=0.8, label=title.split()[0])  # fmt: skip
        below.set(xlabel="step", ylabel="likeliest\nblock", ylim=(-1, self.blocks * (1.7 if len(heats) > 1 else 1)))
        below.set_yticks(sorted({0, self.blocks // 2, self.blocks - 1}))
        if len(heats) > 1:  # the legend stands above the last block
            below.legend(loc="upper right", ncols=2)
        axes = right.subplots()
        axes.vlines(table.block, table.low.clip(lower=FLOOR / 10), table.high.clip(lower=FLOOR / 10), linewidth=3,
                    color=figure.MEASURED, alpha=0.4, label="95 % of simulated runs")  # fmt: skip
        axes.plot(table.block, table.run.where(table.run > 0), "D", color=figure.COLOURS["block-sparse"], markersize=3,
                  label="this run")  # fmt: skip
        if "economical" in table:
            axes.plot(table.block, table.economical, "_", color=figure.BOUND, markersize=5, label="cost-aware")
        axes.axhline(1 / self.blocks, color=figure.GREY, linestyle=":", linewidth=0.9, label="uniform")
        axes.set(xlabel="block", ylabel="share of steps", yscale="log", ylim=(FLOOR, 1.5),
                 title="share of steps after the warm-up")  # fmt: skip
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 0.02))
        figure.panels([*tops, axes])
        return {"adaptive": drawn}
