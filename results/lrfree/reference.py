"""Time to the accuracy that MeZO's published procedure reaches in ten minutes.

    python results/lrfree/reference.py --model DIR --data DIR --task sst2 --task rte --csv results/lrfree/reference.csv

``--part reference`` stops after step 2 below, whose time is charged and not measured, so it may share its GPU;
``--part methods`` reads the rows of the CSV file and does step 3.

Ten minutes of the published procedure per learning rate and seed are not affordable here, and not necessary: ``mezo``
takes the same steps.  It measures the same two losses along a direction of the same distribution and moves by the same
amount, only faster.  So this script

1. times the published procedure (``zeroblock.bench.reference``) for some steps on the run's own batches;
2. runs ``mezo`` with each learning rate for a share of the steps that fit into ten minutes at that speed, lets dev
   choose, takes all of them with the chosen one, and charges every step the time of a published one;
3. runs methods without a learning rate on the clock, and notes when they reach the same dev accuracy and dev loss.

No time is extrapolated from a shorter run, and no step is left out; the trajectory of the published code is replaced by
another sample of the same procedure, one that keeps 16-bit weights better (copies and stochastic rounding in place of
subtraction and rounding to the nearest), which favours the reference.  Dev rows decide everything; test is not read.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from zeroblock.bench.batch import Pool
from zeroblock.bench.run import reference_ms
from zeroblock.bench.script import append
from zeroblock.budget import Budget
from zeroblock.method import METHODS
from zeroblock.optimizer import ZeroOrder
from zeroblock.train import Config
from zeroblock.train.batch import Batches
from zeroblock.train.workload import Workload, prepare, resolve


@dataclasses.dataclass(frozen=True)
class Mark:
    """One evaluation of a run.

    Args:
        step: number of steps taken.
        seconds: seconds of training so far.
        loss: the loss on dev.
        dev: the metric on dev.
    """

    step: int
    seconds: float
    loss: float
    dev: float


class Bench:
    """A task on a model whose weights can be put back.

    Args:
        model: a folder or a name, as for ``zeroblock train``.
        task: name of the task.
        data: the folder with local rows; None for the hub.
        seed: the seed of data and noise.
        batch_size: examples per step.
        dev: maximum number of dev rows.
    """

    def __init__(
        self, model: str, task: str, data: str | None, seed: int = 0, batch_size: int = 16, dev: int = 500
    ) -> None:
        config = Config(model=model, task=task, data=data, data_seed=seed, seed=seed, lr=0.0, batch_size=batch_size)
        self.work: Workload = prepare(resolve(config.replace(dev=dev)), splits=("dev",))
        self.seed, self.batch_size = seed, batch_size
        self._weights: dict[str, Tensor] = {n: p.detach().clone() for n, p in self.work.model.named_parameters()}
        self._batches = Batches(len(self.work.train), batch_size, seed)

    def restore(self) -> None:
        """Put the model's own weights back."""
        with torch.no_grad():
            for name, param in self.work.model.named_parameters():
                param.copy_(self._weights[name])

    def objective(self, step: int) -> Any:
        """The objective of a step."""
        encoded, labels = zip(*(self.work.train[i] for i in self._batches.at(step)), strict=True)
        return self.work.engine.objective(encoded, labels, over=self.work.task.over)

    def measure(self) -> tuple[float, float]:
        """Dev loss and dev metric of the current weights."""
        found = self.work.evaluator(self.work.exams["dev"])
        return found.loss, found.value

    def run(
        self, optimizer: ZeroOrder, *, lr: float | None, evals: int, steps: int | None = None, limit_s: float = 0.0
    ) -> list[Mark]:
        """Train for a number of steps, or for some seconds, and measure dev on the way, before the first step too.

        Args:
            optimizer: a fresh optimizer of this model.
            lr: a constant rate; None lets the budget of displacement choose one that falls to zero over the run.
            evals: number of evaluations, spread evenly over the run.
            steps: number of steps; None if the clock ends the run.
            limit_s: seconds of training, if the clock ends the run.
        """
        budget = Budget.of(optimizer) if lr is None else None
        clock = Stopwatch()
        marks = [Mark(0, 0.0, *self.measure())]
        spent, step = 0.0, 0
        while step < steps if steps is not None else clock.seconds < limit_s:
            if budget is not None:
                left = steps - step if steps is not None else _left(step, clock.seconds, limit_s)
                lr = budget.rest(spent, max(1.0, left))
                spent += (lr * budget.weight) ** 2
            optimizer.lr = lr
            clock.go()
            optimizer.step(self.objective(step))
            step += 1
            share = step / steps if steps is not None else clock.seconds / limit_s
            if share * evals >= len(marks):
                optimizer.flush()
                clock.stop()
                marks.append(Mark(step, clock.seconds, *self.measure()))
                print(
                    f"    step {step}, {clock.seconds:.1f} s: dev {marks[-1].dev:.1%}, {marks[-1].loss:.4f}", flush=True
                )
        optimizer.flush()
        clock.stop()
        optimizer.settle()
        if marks[-1].step < step:
            marks.append(Mark(step, clock.seconds, *self.measure()))
        return marks


class Stopwatch:
    """Seconds of training, without evaluations."""

    def __init__(self) -> None:
        self._before, self._since = 0.0, None

    _since: float | None

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self._before + (0.0 if self._since is None else time.perf_counter() - self._since)

    def go(self) -> None:
        """Start, unless it is already running."""
        if self._since is None:
            self._since = time.perf_counter()

    def stop(self) -> None:
        """Wait for the device, and stop."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._before, self._since = self.seconds, None


REFERENCE = "mezo-reference"
"""The published procedure's name in the rows."""
FIRST_GUESS_STEPS = 1000.0
"""Assumed number of steps of a run before its speed is known."""


def _left(step: int, seconds: float, limit_s: float) -> float:
    """The steps left in a run that the clock ends, at the speed so far."""
    return FIRST_GUESS_STEPS if not step or not seconds else (limit_s - seconds) * step / seconds


def first(marks: Iterable[Mark], reached: Callable[[Mark], bool]) -> Mark | None:
    """The first evaluation after step 0 that satisfies ``reached``."""
    return next((mark for mark in marks if mark.step and reached(mark)), None)


def run(bench: Bench, method: str, lr: float | None, **length: Any) -> list[Mark]:
    """Run a method from the model's own weights; return its evaluations."""
    bench.restore()
    optimizer = METHODS[method](bench.work.model, lr=lr, seed=bench.seed)
    return bench.run(optimizer, lr=lr, **length)


def reference(bench: Bench, args: argparse.Namespace, task: str) -> list[dict[str, Any]]:
    """The rows of the published procedure on one task and seed, one per evaluation, at the learning rate dev chose."""
    encoded, labels = zip(*bench.work.train, strict=True)
    pool = Pool(encoded, labels, bench.work.task.over)
    each_s = (args.step_ms or reference_ms(bench.work.model, pool, bench.batch_size)) / 1e3
    steps = max(1, int(60 * args.minutes / each_s))
    print(f"{task}: {1e3 * each_s:.1f} ms per published step, {steps} steps in {args.minutes:g} min", flush=True)
    tries = {}
    for lr in args.lr:
        marks = run(
            bench, "mezo", lr, steps=max(1, int(args.share * steps)), evals=args.evals if args.share == 1 else 2
        )
        tries[lr] = min((mark.loss for mark in marks[1:] if not math.isnan(mark.loss)), default=math.inf), marks
        print(f"  mezo lr {lr:g}: dev loss {marks[-1].loss:.4f} after {marks[-1].step} steps", flush=True)
    lr = min(tries, key=lambda one: tries[one][0])
    marks = tries[lr][1] if args.share == 1 else run(bench, "mezo", lr, steps=steps, evals=args.evals)
    charged = [Mark(mark.step, mark.step * each_s, mark.loss, mark.dev) for mark in marks]
    tell(REFERENCE, charged, charged)
    return [_row(bench, args, task, REFERENCE, lr, args.minutes, 2, mark) for mark in charged]


def methods(bench: Bench, args: argparse.Namespace, task: str, charged: list[Mark]) -> list[dict[str, Any]]:
    """The rows of methods without a learning rate on one task and seed, one per evaluation."""
    rows = []
    for method in args.method:
        forwards = len(METHODS[method](bench.work.model).plan().points)
        run(bench, method, None, steps=64, evals=1)  # compiles kernels, as the published procedure was warmed up too
        for seconds in args.seconds:
            marks = run(bench, method, None, limit_s=seconds, evals=2 * args.evals)
            rows += [_row(bench, args, task, method, "auto", seconds / 60, forwards, mark) for mark in marks]
            tell(f"{method}, {seconds:g} s", marks, charged)
    return rows


def tell(name: str, marks: list[Mark], charged: list[Mark]) -> None:
    """Print when a run reaches the best dev metric and the lowest dev loss of the published procedure."""
    best, lowest = max(mark.dev for mark in charged[1:]), min(mark.loss for mark in charged[1:])
    told = [f"best dev {max(mark.dev for mark in marks[1:]):.1%}"]
    for word, there in (
        (f"dev {best:.1%}", first(marks, lambda mark: mark.dev >= best)),
        (f"dev loss {lowest:.4f}", first(marks, lambda mark: mark.loss <= lowest)),
    ):
        told.append(f"{word} after {there.seconds:.1f} s, {there.step} steps" if there else f"{word} not reached")
    print(f"  {name}: {'; '.join(told)}", flush=True)


def charged_rows(path: str, name: str, task: str, seed: int) -> list[Mark]:
    """The evaluations of the published procedure that a CSV file holds."""
    with open(path, newline="") as lines:
        found = [
            Mark(int(row["step"]), float(row["seconds"]), float(row["dev_loss"]), float(row["dev"]))
            for row in csv.DictReader(lines)
            if (row["method"], row["model"], row["task"], int(row["seed"])) == (REFERENCE, name, task, seed)
        ]
    if not found:
        raise SystemExit(f"{path} has no rows of {REFERENCE} on {task} with seed {seed}: run --part reference first")
    return found


def _row(
    bench: Bench, args: argparse.Namespace, task: str, method: str, lr: float | str, minutes: float, forwards: int,
    mark: Mark,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model": args.name, "task": task, "seed": bench.seed,
        "method": method, "lr": lr, "minutes": round(minutes, 4), "step": mark.step, "forwards": forwards * mark.step,
        "seconds": round(mark.seconds, 3), "dev_loss": round(mark.loss, 5), "dev": round(mark.dev, 5),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", default="qwen2.5-1.5b", help="name of the model in the rows")
    parser.add_argument("--data")
    parser.add_argument("--task", action="append", required=True)
    parser.add_argument(
        "--lr", type=float, nargs="+", default=[1e-7, 3e-7, 1e-6], help="learning rates of mezo, from which dev chooses"
    )
    parser.add_argument(
        "--share",
        type=float,
        default=0.1,
        help="share of the steps for which each learning rate is tried; with 1 a rate that diverges late is not chosen",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes of the published procedure")
    parser.add_argument(
        "--step-ms", type=float, help="milliseconds per step of the published procedure, if timed before"
    )
    parser.add_argument(
        "--method", nargs="+", default=["mezo_bcd", "fzoo_bcd"], help="methods to run without a learning rate"
    )
    parser.add_argument("--seconds", type=float, nargs="+", default=[10.0, 30.0], help="lengths of their runs")
    parser.add_argument("--dev", type=int, default=500, help="maximum number of dev rows")
    parser.add_argument(
        "--evals", type=int, default=20, help="evaluations of the reference; the others get twice as many"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=("reference", "methods"), help="one of the two; both by default")
    parser.add_argument("--csv")
    args = parser.parse_args()
    if args.part == "methods" and args.csv is None:
        parser.error("--part methods needs the --csv file that --part reference wrote")
    for task in args.task:
        bench = Bench(args.model, task, args.data, args.seed, dev=args.dev)
        device = str(bench.work.engine.device.type)
        if args.part == "methods":
            charged = charged_rows(args.csv, args.name, task, args.seed)
        else:
            rows = reference(bench, args, task)
            append(args.csv, rows, device)
            charged = [Mark(row["step"], row["seconds"], row["dev_loss"], row["dev"]) for row in rows]
        if args.part != "reference":
            append(args.csv, methods(bench, args, task, charged), device)


if __name__ == "__main__":
    main()
