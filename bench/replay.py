"""All steps of a replay in one launch against the same steps one by one, on a GPU.

python bench/replay.py [--numel N] [--steps T] [--csv results/replay.csv]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import numpy as np
import torch

from zeroblock import ops
from zeroblock.bench.operation import DTYPES, name_of
from zeroblock.bench.script import append, machine, positive, seconds, writable
from zeroblock.noise import Draw, Key, Rounding
from zeroblock.ops import replay
from zeroblock.ops.replay import Matrix, Piece, Pieces, Steps

RANK, SIDE = 2, 4096  # rank of the subspace and side of the matrix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=positive, default=1 << 24, help="weights of the tensor that takes dense noise")
    parser.add_argument("--steps", type=positive, default=1000)
    parser.add_argument("--csv", help="append the rows to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("a replay in one launch needs a CUDA device")
    if args.csv:
        writable(args.csv)
    step = np.arange(args.steps)
    steps = Steps(step, step, np.full((args.steps, 1), 1e-6), np.ones(args.steps))
    draw, rows = Draw(Key(0, 0)), []
    print(f"{machine('cuda')}, torch {torch.__version__}, {args.steps:,} steps")
    for dtype in DTYPES:
        x, matrix = (torch.randn(n, device="cuda").to(dtype) for n in (args.numel, SIDE * SIDE))

        def one_by_one(x: torch.Tensor = x) -> None:
            for t in step.tolist():
                ops.add_noise_(x, Draw(Key(0, t)), 1e-6)

        def at_once(group: Pieces | Matrix) -> Callable[[], None]:
            return lambda: replay.advance_(group, steps, Rounding.STOCHASTIC)

        timed = {
            "one by one": (one_by_one, args.numel),
            "at once": (at_once(Pieces([Piece(x, draw)])), args.numel),
            f"at once, rank {RANK}": (at_once(Matrix(matrix, draw, SIDE, RANK)), SIDE * SIDE),
        }
        for name, (run, numel) in timed.items():
            taken = seconds(run, "cuda", repeats=3, warm=1)
            row = {
                "operation": name,
                "dtype": name_of(dtype),
                "numel": numel,
                "steps": args.steps,
                "ms": round(taken * 1e3, 3),
                "elements_per_s": round(numel * args.steps / taken),
            }
            rows.append(row)
            print(f"{name:20} {row['dtype']:9} {row['ms']:10.3f} ms {row['elements_per_s'] / 1e9:8.1f} G weights/s")
    append(args.csv, rows, "cuda")


if __name__ == "__main__":
    main()
