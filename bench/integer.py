"""Matrices stored as integers: the operations on one, and a model of them, against plain torch and floats.

    python bench/integer.py [--size 4096] [--tokens 16] [--threads 1] [--repeats 5] [--csv results/integer.csv]
    python bench/integer.py --model smollm2 [--task sst2] [--data DIR] …

Three versions take turns, and a row has the medians of their processor time, which other processes do not
lengthen: the compiled loops, plain torch, which expands whole matrices by one operation after another, and weights
in fp32.  With a model, 100 examples are evaluated and three steps of mezo_bcd are taken on batches of 16.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
from torch.nn import functional as F

from zeroblock import Engine, ops
from zeroblock.bench import variant
from zeroblock.bench.batch import Pool, encode
from zeroblock.bench.script import append, machine, positive, writable
from zeroblock.model import load, tokenizer
from zeroblock.noise import Draw, Key
from zeroblock.ops import integer
from zeroblock.ops.integer import Integers, packed, reference
from zeroblock.quantise import KINDS, quantised
from zeroblock.task import get

Run = Callable[[], object]
EXAMPLES, BATCH, GROUP = 100, 16, 64
DRAW = Draw(Key(0, 1))


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """A context in which integers go through plain torch, a whole matrix at a time."""
    with mock.patch.object(integer, "backend", return_value=reference), mock.patch.object(integer, "PIECE", 1 << 62):
        yield


def medians(compiled: Run, plain: Run, floats: Run, repeats: int, warm: int = 1) -> list[float]:
    """Median seconds of the three versions, which take turns; the first ``warm`` turns are not counted."""
    times: list[list[float]] = [[], [], []]
    contexts = (contextlib.nullcontext, plainly, contextlib.nullcontext)
    for _ in range(warm + repeats):
        for taken, run, context in zip(times, (compiled, plain, floats), contexts, strict=True):
            with context():
                begin = time.process_time()
                run()
                taken.append(time.process_time() - begin)
    return [statistics.median(taken[warm:]) for taken in times]


def row(operation: str, weights: str, numel: int, seconds: list[float]) -> dict[str, object]:
    """Print a line, and return it as a row."""
    compiled, plain, floats = (round(1e3 * s, 3) for s in seconds)
    over = {"plain_over_compiled": round(plain / compiled, 2), "compiled_over_float": round(compiled / floats, 2)}
    print(f"{operation:28} {weights:5} {compiled:10.2f} {plain:10.2f} {floats:10.2f} {over}", flush=True)
    about = {"operation": operation, "weights": weights, "numel": numel, "threads": torch.get_num_threads()}
    return about | {"compiled_ms": compiled, "plain_ms": plain, "float_ms": floats} | over


def operations(size: int, tokens: int, repeats: int) -> Iterator[dict[str, object]]:
    """Rows of the operations on a square matrix."""
    matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    x = torch.randn(tokens, size)
    for kind in KINDS.values():
        integers, scales = quantised(matrix, kind, GROUP)
        one = Integers(packed(integers, kind.bits), kind.bits, scales)
        runs: dict[str, tuple[Run, Run]] = {
            "expand, against a copy": (functools.partial(integer.expand, one), matrix.clone),
            f"linear, {tokens} tokens": (
                functools.partial(integer.linear, x, one), functools.partial(F.linear, x, matrix)
            ),
            "perturb_pair": (
                functools.partial(integer.perturb_pair, one, DRAW, 1e-3),
                functools.partial(ops.perturb_pair, matrix, DRAW, 1e-3),
            ),
            "add_noise_": (
                functools.partial(integer.add_noise_, one, DRAW, 1e-6),
                functools.partial(ops.add_noise_, matrix, DRAW, 1e-9),
            ),
        }  # fmt: skip
        for name, (run, floats) in runs.items():
            yield row(name, f"int{kind.bits}", matrix.numel(), medians(run, run, floats, repeats))


def models(name: str, pool: Pool, task: str, repeats: int) -> Iterator[dict[str, object]]:
    """Rows of a model: an evaluation, and three steps of mezo_bcd."""
    exams, steps, numel = {}, {}, 0
    for weights in (None, *KINDS):
        model = load(name, torch.float32, "cpu", weights=weights)
        numel = numel or sum(p.numel() for p in model.parameters())
        ready = variant.build(variant.Choice("mezo_bcd", "forked"), model, seed=0)
        exams[weights] = functools.partial(Engine(model).scores, pool.encoded)
        steps[weights] = functools.partial(_cycle, ready, pool)
    for operation, runs in ((f"{task}, {len(pool.encoded)} examples", exams), ("mezo_bcd, 3 steps", steps)):
        for weights in KINDS:
            times = medians(runs[weights], runs[weights], runs[None], repeats, warm=0)
            yield row(operation, weights, numel, times)


def _cycle(ready: variant.Variant, pool: Pool) -> None:
    """The first three steps of a run, which are the same ones every time."""
    ready.rewind(3)
    for step in range(3):
        ready.step(pool.batch(step, BATCH))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=positive, default=4096, help="rows and columns of the matrix")
    parser.add_argument("--tokens", type=positive, default=16, help="rows that the matrix is multiplied with")
    parser.add_argument("--model", help="measure this model in place of a matrix")
    parser.add_argument("--task", default="sst2")
    parser.add_argument("--data", type=Path, help="local rows of the task; the hub by default")
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--csv", help="append the rows to this file")
    args = parser.parse_args()
    if args.csv:
        writable(args.csv)
    torch.set_num_threads(args.threads)
    print(f"{machine('cpu')}, torch {torch.__version__}")
    print(f"{'operation':28} {'':5} {'compiled':>10} {'plain':>10} {'float':>10}  ms")
    if args.model:
        examples = encode(get(args.task), args.data, tokenizer(args.model), limit=EXAMPLES)
        rows = models(args.model, examples, args.task, args.repeats)
    else:
        rows = operations(args.size, args.tokens, args.repeats)
    append(args.csv, list(rows), "cpu")
