"""One heat of a race: train for a number of seconds, measure dev on the way, and measure test at the end.

Only steps are on the clock.  Before it starts, steps that move nothing compile and capture what the others use, and
show the pace.  Dev is measured at equal intervals of time; the weights that it selects are kept in memory, and a
runner measures test once, with them.  A task that generates text is measured, and its weights selected, by dev loss,
because generating takes longer than the training of a short race.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, no_grad

from .. import atomic
from ..bench import host
from ..budget import Budget
from ..errors import DivergenceError
from ..evaluate.evaluator import Evaluation
from ..evaluate.measurement import plain
from ..precision import small_eps
from ..record import Record
from ..report.summary import select
from ..run.graph import Graphs
from ..sweep.worker import Job
from ..task.metric import LIKELIHOOD
from ..train import cache
from ..train.batch import Batches
from ..train.config import Config
from ..train.learner import ZerothOrder, learner
from ..train.lr import lr_at
from ..train.price import priced
from ..train.session import out_of_memory
from ..train.workload import Workload, prepare, resolve
from .plan import warm_up_seconds

MIN_WARM_UP_STEPS = 2
BACKWARD = 2
"""A backward pass counts as this many forward passes, because it takes about as long."""
LR_LENGTH = 10_000
"""The number of equal parts of a heat's seconds; a falling learning rate is lowered after each."""
LESS_PER_HEAT = (
    "the same command tries this heat again; heats need less in a new folder with fewer --jobs at a time, or with "
    "--set max_tokens=N (rows are split, the losses stay the same)"
)
"""How a heat, which shares the device with others, gets enough memory; a race that has begun keeps its settings."""
OF_METHODS = (
    "method", "lr", "steps", "batch_size", "accumulate", "lr_schedule", "eps", "weight_decay", "partition",
    "schedule", "interval", "fold", "rank", "keep", "probes", "clip", "as_published", "rounding", "eval_every",
)  # fmt: skip
"""Settings that concern neither the model nor the data, so that heats that differ only in these share both."""

_held: dict[str, Any] = {}
"""The workload of the last heat of this process, with the settings it was made for and its zero-shot result."""


def make(job: Job) -> str:
    """Make a heat and write its result to the file that the job names.

    Args:
        job: the job, with the configuration, ``seconds`` and ``evals``; ``kind`` is ``try`` or ``run``.
    """
    gc.collect()  # frees the optimizer of the previous heat
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # for the heats of other processes
    config = resolve(Config.of(tomllib.loads(job["config"])))
    with out_of_memory(fix=LESS_PER_HEAT):
        work = priced(_workload(config), print)
        heat = Heat(work, float(job["seconds"]), int(job["evals"]))
        result = heat.run(tests=job["kind"] == "run")
    about = {name: job[name] for name in ("entrant", "kind")}
    about |= {"method": config.method, "lr": config.lr, "seed": config.seed, "dtype": config.dtype}
    about |= host.stamp(heat.device) | {"caution": heat.caution}
    atomic.write(Path(job["folder"]), json.dumps(plain(about | result)) + "\n")
    return ""


def _workload(config: Config) -> Workload:
    """The workload of a configuration, with base weights; the last heat's is reused if only the method differs."""
    kept = {name: value for name, value in dataclasses.asdict(config).items() if name not in OF_METHODS}
    if not config.random_weights and config.adapter is None:  # else the seed decides the weights
        kept.pop("seed")
    key = (config.trains, kept)
    held: Workload | None = _held.get("workload") if _held.get("key") == key else None
    if held is not None and cache.holds(config, held.model):
        cache.model(config)
        if held.engine.graphs is not None:  # drop the previous heat's graphs, or its reason not to capture any
            held.engine.graphs = Graphs()
        return dataclasses.replace(held, config=config)
    _held.clear()
    del held  # or there would be two models while the next one is loaded
    fresh = prepare(config, tell=print)
    _held.update(key=key, workload=fresh)
    return fresh


def _kept(module: Any) -> dict[str, Tensor]:
    """A copy of the weights that move, in host memory if the model is too large to be held twice."""
    large = sum(param.nbytes for param in module.parameters()) > cache.MAX_CACHED_BYTES
    moving = {name: param.detach() for name, param in module.named_parameters() if param.requires_grad}
    return {name: param.to("cpu", copy=True) if large else param.clone() for name, param in moving.items()}


class Heat:
    """A heat in progress.

    Args:
        work: the model, the task and the data.
        seconds: seconds of training.
        evals: evaluations on dev after the one before the first step.
    """

    def __init__(self, work: Workload, seconds: float, evals: int) -> None:
        self.work, self.config, self.limit, self.evals = work, work.config, seconds, evals
        self.device = next(work.model.parameters()).device.type
        task = work.task
        if task.metric.generates and self.config.objective == "loss":
            task = dataclasses.replace(task, metric=LIKELIHOOD)
        self.evaluators = {"dev": dataclasses.replace(work.evaluator, task=task), "test": work.evaluator}
        self.learner = learner(self.config, work.model, self._on_step) if self.config.trains else None
        self.optimizer = self.learner.optimizer if isinstance(self.learner, ZerothOrder) else None
        self.caution = self._caution()
        size = self.config.batch_size * self.config.accumulate
        self.batches = Batches(len(work.train), size, self.config.data_seed) if self.learner else None
        self.seconds = 0.0
        """Seconds on the clock."""
        self.evaluating = 0.0
        self.forwards = self.skipped = self.heard = 0
        self._warm_up_steps = 0
        self.measured: dict[int, Evaluation] = {}
        self.points: list[dict[str, float]] = []
        self.best: dict[str, Tensor] = {}
        self._rate = self._rates()
        self._pace: tuple[int, float] = (0, 0.0)
        """Steps before the second half of the warm-up, and the clock at that moment, which is negative."""
        self._points_per_step: dict[bool, int] = {}

    def run(self, tests: bool) -> dict[str, Any]:
        """Run to the end.

        Args:
            tests: whether to measure test with the weights that dev selects.
        """
        self._start()
        if self.learner is not None:
            self._warm_up()
            marks = [self.limit * mark / self.evals for mark in range(1, self.evals + 1)]
            for mark in marks:
                diverged = False
                if self.seconds < mark:  # a step may take longer than the time between two marks
                    diverged = self._train(mark)
                if (self._whole or diverged or mark == marks[-1]) and self.steps not in self.measured:
                    self._measure()
                if diverged:
                    break
        chosen = self._selected
        test: Evaluation | None = None
        if tests:
            with no_grad():
                for name, param in self.work.model.named_parameters():
                    if name in self.best:
                        param.copy_(self.best[name])
            test = self._evaluate("test")
        dev = self.measured[chosen]
        return {
            "limit": self.limit, "seconds": self.seconds, "evaluating": self.evaluating, "points": self.points,
            "steps": self.steps, "skipped": self.skipped, "forwards": self.forwards,
            "metric": self.work.task.metric.name, "dev_metric": dev.metric, "selected": chosen, "dev": dev.value,
            "dev_loss": dev.loss, "dev_n": dev.n,
            "test": test.value if test else None, "test_loss": test.loss if test else None,
            "test_n": test.n if test else 0,
        }  # fmt: skip

    def _caution(self) -> str:
        """What makes the heat worse than its method is, with the setting that mends it; empty if nothing does."""
        if self.optimizer is None or self.config.adapter or (found := small_eps(self.optimizer)) is None:
            return ""
        told, better = found
        name = self.config.method
        return f"{told}; race NAME={name} with --set NAME.eps={better:g}, or all methods with --dtype fp32"

    @property
    def steps(self) -> int:
        """The steps taken since the clock started."""
        return self.learner.steps - self._warm_up_steps if self.learner else 0

    @property
    def _selected(self) -> int:
        """The step that dev selects; the one before training only if nothing else was measured."""
        after = {step: one for step, one in self.measured.items() if step} or self.measured
        return select(after, self.config.objective == "loss")

    def _start(self) -> None:
        """Measure the base weights, once for all heats that share them."""
        if "start" not in _held:
            _held["start"] = self._evaluate("dev")
        self._add(0, _held["start"])

    def _evaluate(self, split: str) -> Evaluation:
        evaluation = self.evaluators[split](self.work.exams[split])
        self.evaluating += evaluation.seconds
        return evaluation

    def _measure(self) -> None:
        """Measure dev, and keep the weights if it selects them."""
        assert self.learner is not None
        self.learner.settle()
        self._add(self.steps, self._evaluate("dev"))
        if self._selected == self.steps:
            self.best.clear()
            self.best = _kept(self.work.model)

    def _add(self, step: int, dev: Evaluation) -> None:
        self.measured[step] = dev
        point = {"step": step, "forwards": self.forwards, "seconds": self.seconds, "dev": dev.value, "loss": dev.loss}
        self.points.append({name: plain(value) for name, value in point.items()})

    def _warm_up(self) -> None:
        """Take steps that move nothing, off the clock and not counted."""
        assert self.learner is not None
        begin = time.perf_counter()
        half, end = (begin + share * warm_up_seconds(self.limit) for share in (0.5, 1.0))
        middle: tuple[int, float] | None = None
        while self.learner.steps < MIN_WARM_UP_STEPS or time.perf_counter() < end:
            self._step(0.0)
            if middle is None and time.perf_counter() >= half:
                self.learner.flush()
                middle = self.learner.steps, time.perf_counter()
        self.learner.flush()
        steps, then = middle or (0, begin)
        if steps == self.learner.steps:
            steps, then = 0, begin
        self._pace = steps, then - time.perf_counter()
        self._warm_up_steps, self.forwards, self.skipped = self.learner.steps, 0, 0

    @property
    def _whole(self) -> bool:
        """Whether the weights contain every step so far, so that they can be measured."""
        return self.optimizer is None or self.optimizer.steps % self.optimizer.fold == 0

    def _train(self, until: float) -> bool:
        """Train until the clock shows ``until`` seconds; return whether the loss stopped being finite before."""
        assert self.learner is not None
        begin, diverged = time.perf_counter() - self.seconds, False
        try:
            while (now := self._now(begin)) < until or not (self._whole or now >= self.limit):
                self._step(self._rate(now))
            self.learner.flush()
        except DivergenceError as error:
            print(error)
            diverged = True
            with contextlib.suppress(DivergenceError):  # again, if more such steps were under way
                self.learner.flush()
        self.seconds = time.perf_counter() - begin
        return diverged

    def _now(self, begin: float) -> float:
        """A prediction of the clock when all steps that were submitted to the GPU have ended."""
        assert self.learner is not None
        now, (steps, then) = time.perf_counter() - begin, self._pace
        under_way = self.learner.steps - self.heard
        return now + under_way * (now - then) / (self.learner.steps - steps)

    def _step(self, lr: float) -> None:
        assert self.learner is not None
        assert self.batches is not None
        step, points = self.learner.steps, self._points()
        batch = [i for one in range(step, step + self.learner.batches) for i in self.batches.at(one)]
        objectives = self.work.objectives(batch)
        self.forwards += points * len(objectives)
        self.learner.step(objectives, lr)

    def _points(self) -> int:
        """Forward passes per batch of the next step; a step of ``ft`` has a backward pass, too."""
        if self.optimizer is None:
            return 1 + BACKWARD
        first = self.optimizer.age == 0  # an anchor is measured at the first step of a turn
        if first not in self._points_per_step:
            self._points_per_step[first] = len(self.optimizer.plan().points)
        return self._points_per_step[first]

    def _on_step(self, record: Record) -> None:
        self.heard += 1
        self.skipped += not record.finite

    def _rates(self) -> Callable[[float], float]:
        """The learning rate by the seconds on the clock: the configured one, or one that spends the budget."""
        if self.config.lr is not None or self.optimizer is None:
            falling = self.config.replace(steps=LR_LENGTH, eval_every=LR_LENGTH) if self.learner else self.config
            return lambda now: lr_at(falling, min(int(LR_LENGTH * now / self.limit), LR_LENGTH - 1))
        budget, spent = Budget.of(self.optimizer), 0.0

        def automatic(now: float) -> float:
            nonlocal spent
            assert self.learner is not None
            steps, then = self._pace
            left = (self.limit - now) * (self.learner.steps - steps) / (now - then)
            lr = budget.rest(spent, max(1.0, left))
            spent += (lr * budget.weight) ** 2
            return lr if math.isfinite(lr) else 0.0

        return automatic
