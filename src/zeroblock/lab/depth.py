"""Alignment by depth on a model, at the start and along an adaptive run, next to the schedules' probabilities.

Measuring needs only torch.  Rows go to a CSV one by one, so a killed run keeps the rows it has written, and
:mod:`.profile` draws them later, on any machine.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..closure import Closure as Objective
from ..errors import ZeroBlockError
from ..optimizer import ZeroOrder
from ..record import Record
from ..schedule import Economical
from . import model
from .model import Closure, Curvature, Estimate, Measure

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Depth:
    """Measures every block at some steps of a run.

    Args:
        optimizer: the optimizer of the run, at step 0; its schedule must have ``probabilities``.
        held: the held-out batches to measure on.
        batches: the objectives of the run, one per step.
        at: steps at which to measure, ascending from 0.
        economical: a cost-aware schedule; it observes the run's coefficients but chooses no blocks.
        ways: "backward", "forward" or both.
        probes: random vectors per trace.
        iterations: number of Lanczos iterations.
        sketch: number of vectors for the forward bracket of λmax; 0 skips it.
        subject: the name of the run in figures.
    """

    optimizer: ZeroOrder
    held: Sequence[Closure]
    batches: Iterable[Objective]
    at: tuple[int, ...] = (0,)
    economical: Economical = dataclasses.field(default_factory=Economical)
    ways: tuple[str, ...] = ("backward",)
    probes: int = 4
    iterations: int = 6
    sketch: int = 0
    subject: str = ""

    def __post_init__(self) -> None:
        if not self.at or self.at[0] != 0 or list(self.at) != sorted(set(self.at)):
            raise ZeroBlockError("the steps to measure at must ascend from 0")
        if not set(self.ways) <= {"backward", "forward"}:
            raise ZeroBlockError(f"a model is measured backward or forward, not {', '.join(self.ways)}")

    @property
    def jobs(self) -> int:
        """The number of ticks: one per step, and one per block and measurement."""
        return self.at[-1] + len(self.at) * len(self.ways) * len(self.optimizer.blocks)

    def rows(
        self,
        listen: Callable[[Record], None],
        tick: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> Iterator[Row]:
        """Take the run's steps and measure; yield one row per measurement and block as soon as it is known.

        Args:
            listen: called with the record of every step.
            tick: called once per job; see ``jobs``.
            say: called with a line of progress.
        """
        schedule: Any = self.optimizer.schedule
        n = len(self.optimizer.blocks)
        visits, scores = [0] * n, [0.0] * n
        costs = self.economical.costs or (1.0,) * n

        def heard(record: Record) -> None:
            visits[record.block] += 1
            if record.finite:
                self.economical.observe(scores, record.block, record.coeffs)
            listen(record)
            tick()

        self.optimizer.listener = heard
        batches = iter(self.batches)
        for stop in self.at:
            if stop:
                say(f"steps to {stop}")
            while self.optimizer.steps < stop:
                self.optimizer.step(next(batches))
            self.optimizer.flush()
            say(f"measure at {stop}")
            p, q = schedule.probabilities(self.optimizer.scores), self.economical.probabilities(scores)
            for way in self.ways:
                with contextlib.closing(self._measured(way)) as measured:
                    for i, (measure, top) in enumerate(measured):
                        chosen = {"probability": p[i], "economical": q[i], "cost": costs[i], "visits": visits[i]}
                        head = {"subject": self.subject, "step": stop, "way": way, "block": i}
                        yield head | chosen | _flat(measure, top)
                        tick()
                torch.cuda.empty_cache()  # graphs of gradients are large, and other runs may share the GPU

    def _measured(self, way: str) -> Generator[tuple[Measure, Estimate]]:
        """The measurement of each block, with λmax of the model."""
        module, seed = self.optimizer.model, self.optimizer.seed

        def partition(_: object) -> Any:
            return self.optimizer.blocks

        if way == "backward":
            with sdpa_kernel(SDPBackend.MATH):  # the fused kernels cannot be differentiated twice
                whole = Curvature.of(module, self.held)
                top = model.top(module, whole, iterations=self.iterations, seed=seed)
                known = {"probes": self.probes, "iterations": self.iterations, "seed": seed}
                yield from zip(model.backward(module, whole, partition, **known), itertools.repeat(top))
            return
        eps: float = self.optimizer.estimator.eps  # type: ignore[attr-defined]
        measures = list(
            model.forward(module, self.held, partition, probes=self.probes, sketch=self.sketch, eps=eps, seed=seed)
        )
        tops = [m.top for m in measures if math.isfinite(m.top.value)]
        # λmax(H) is at least every block's; forward passes alone give no better bound
        best = max(tops, key=lambda e: e.value) if tops else Estimate(math.nan, math.nan)
        yield from zip(measures, itertools.repeat(best))


def _flat(block: Measure, top: Estimate) -> Row:
    row: Row = {"name": block.name, "size": block.size}
    rho = block.trace.over(top)
    for name, estimate in (
        ("trace", block.trace), ("top", block.top), ("rho", rho), ("gradient", block.gradient),
        ("variance", block.variance), ("model_top", top),
    ):  # fmt: skip
        row |= {name: estimate.value, f"{name}_error": estimate.error}
    return row


def write(rows: Iterable[Row], path: Path) -> None:
    """Write rows into a CSV, each as soon as it comes, with numbers to six digits."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = None
        for row in rows:
            if writer is None:
                writer = csv.DictWriter(file, list(row), lineterminator="\n")
                writer.writeheader()
            writer.writerow({name: f"{x:.6g}" if isinstance(x, float) else x for name, x in row.items()})
            file.flush()
