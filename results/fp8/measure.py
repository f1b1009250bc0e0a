"""Do steps with 8-bit products (``--gemm fp8``) measure and learn as steps in bf16 do?

    python results/fp8/measure.py --model DIR --data DIR --task sst2 --run bf16 --out OUT
    python results/fp8/measure.py --model DIR --data DIR --task sst2 --run fp8 --out OUT
    python results/fp8/measure.py --task sst2 --compare --out OUT

Both runs take the same steps of ``mezo_bcd`` without a learning rate, one with bf16 products and one with 8-bit ones,
and measure dev with bf16 products at quarters of the run.  The bf16 run measures every coefficient with 8-bit products,
too, at the same weights, along the same direction, on the same batch.  ``--compare`` prints what the rows of both say.

The products are the library's: the kernels on a GPU, their reference on a CPU.  Rows of any length take part, since a
number is rounded in the same way whatever the length of its row.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from zeroblock.bench.script import append
from zeroblock.closure import evaluation
from zeroblock.engine import Engine, eight
from zeroblock.exclusive import exclusive
from zeroblock.method import METHODS
from zeroblock.ops.shared.dispatch import backend
from zeroblock.plan import Plan
from zeroblock.train import Config
from zeroblock.train.batch import Batches
from zeroblock.train.workload import prepare, resolve

RUNS = ("bf16", "bf16-split", "fp8")
"""``bf16-split`` packs each batch into several rows, so that it shows how far two runs in bf16 part."""
SPLIT_TOKENS = 64
"""Tokens of a row of ``bf16-split``."""


def engine(model: torch.nn.Module, products: str) -> Engine:
    """An engine whose products are those of a run."""
    if products != "fp8":
        return Engine(model, graphs=False, max_tokens=SPLIT_TOKENS if products == "bf16-split" else None)
    if next(model.parameters()).is_cuda:
        return Engine(model, graphs=False, gemm="fp8")
    made = Engine(model)
    made.eight = eight.Eight(made.anatomy.layers, backend("eight", "reference"))
    return made


@torch.no_grad()
def coefficient(plan: Plan, objective: Any) -> float:
    """The coefficient of a plan, which is measured but not taken; errors are raised instead of worked around."""
    with exclusive(objective.model), evaluation(objective.model):
        losses = objective.losses(plan.points).double().cpu()
    return float(plan.shape(losses).coeffs[0])


def run(args: argparse.Namespace) -> None:
    """Take the steps of one run; every step and evaluation is a row of a file as soon as it is measured."""
    config = Config(
        model=args.model, task=args.task, data=args.data, data_seed=args.seed, seed=args.seed, dtype="bf16",
        batch_size=args.batch_size, dev=args.dev,
    )  # fmt: skip
    work = prepare(resolve(config), splits=("dev",))
    eight.MIN_FP8_TOKENS = 1
    own, other = engine(work.model, args.run), engine(work.model, "fp8") if args.run == "bf16" else None
    optimizer = METHODS["mezo_bcd"](work.model, lr=None, steps=args.steps, seed=args.seed)
    batches = Batches(len(work.train), args.batch_size, args.seed)
    device, name = own.device.type, {"model": args.name, "task": args.task, "seed": args.seed, "run": args.run}
    spent, since = 0.0, time.perf_counter()
    for step in range(args.steps + 1):
        if step * args.evals % args.steps < args.evals:
            optimizer.flush()
            spent += time.perf_counter() - since
            found = work.evaluator(work.exams["dev"])
            row = {**name, "step": step, "dev_loss": round(found.loss, 5), "dev": round(found.value, 5)}
            append(args.out / "curves.csv", [row | {"seconds": round(spent, 1)}], device)
            print(
                f"{args.run} step {step}: dev loss {found.loss:.4f}, dev {found.value:.1%}, {spent:.0f} s", flush=True
            )
            since = time.perf_counter()
        if step == args.steps:
            return
        encoded, labels = zip(*(work.train[i] for i in batches.at(step)), strict=True)
        plan = optimizer.plan()
        block = optimizer.blocks[plan.turn.block]
        rounded = None
        if other is not None:
            rounded = coefficient(plan, other.objective(encoded, labels, over=work.task.over))
        optimizer.step(own.objective(encoded, labels, over=work.task.over))
        optimizer.flush()
        assert optimizer.record is not None
        if rounded is not None:
            layer = block.params[0] in own.anatomy.layer
            pair = {"bf16": optimizer.record.coeffs[0], "fp8": rounded}
            append(args.out / "agreement.csv", [{**name, "step": step, "block": block.name, "layer": layer, **pair}],
                   device)  # fmt: skip


def compare(args: argparse.Namespace) -> None:
    """Print how the coefficients agree, and the curves beside each other."""
    rows = _read(args.out / "agreement.csv", args.task)
    print(f"{'':24}{'steps':>6}{'corr':>8}{'slope':>8}{'rel rms':>9}{'signs':>7}{'larger half':>13}")
    for title, wanted in (("all steps", ("True", "False")), ("block is a layer", ("True",))):
        some = [(float(row["bf16"]), float(row["fp8"])) for row in rows if row["layer"] in wanted]
        if len(some) > 2:
            _agreement(title, some)
    curves: dict[int, dict[str, str]] = {}
    for row in _read(args.out / "curves.csv", args.task):
        told = f"{float(row['dev_loss']):.4f}  {float(row['dev']):.1%}"
        curves.setdefault(int(row["step"]), {})[f"{row['run']} {row['seed']}"] = told
    names = sorted({name for told in curves.values() for name in told})
    print("\nstep  " + "".join(f"{name:>20}" for name in names))
    for step, found in sorted(curves.items()):
        print(f"{step:4}  " + "".join(f"{found.get(name, ''):>20}" for name in names))


def _agreement(title: str, pairs: Sequence[tuple[float, float]]) -> None:
    """One line: slope through the origin, and the share of equal signs, also among the larger coefficients."""
    x, y = zip(*pairs, strict=True)
    square = sum(a * a for a in x)
    slope, error = sum(a * b for a, b in pairs) / square, sum((a - b) ** 2 for a, b in pairs)
    middle = statistics.median(map(abs, x))
    signs = [(abs(a) >= middle, (a > 0) == (b > 0)) for a, b in pairs]
    large = [same for is_large, same in signs if is_large]
    print(
        f"{title:24}{len(pairs):6}{statistics.correlation(x, y):8.4f}{slope:8.4f}{math.sqrt(error / square):9.4f}"
        f"{statistics.fmean(same for _, same in signs):7.3f}{statistics.fmean(large):13.3f}"
    )


def _read(path: Path, task: str) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["task"] == task]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", choices=RUNS, help="products of the run")
    parser.add_argument("--compare", action="store_true", help="print what the rows in --out say")
    parser.add_argument("--model", help="a folder, as of zeroblock train --model")
    parser.add_argument("--name", default="qwen2.5-1.5b", help="of the model, in the rows")
    parser.add_argument("--data", help="the folder with TASK/train.jsonl and TASK/validation.jsonl")
    parser.add_argument("--task", default="sst2")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--dev", type=int, default=200, help="dev rows")
    parser.add_argument("--evals", type=int, default=4, help="evaluations after the first, at equal distances")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/fp8"), help="the folder of the CSV files")
    args = parser.parse_args()
    if args.run:
        if args.model is None:
            parser.error("--run needs --model")
        run(args)
    if args.compare:
        compare(args)


if __name__ == "__main__":
    main()
