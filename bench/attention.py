"""Attention over a packed row: the kernel against plain attention under the row's mask, on a GPU.

    python bench/attention.py [--heads H] [--size D] [--csv results/attention.csv]

A row packs examples of 64 tokens with two options each; R = 2 points share it.
"""

from __future__ import annotations

import argparse
import sys

import torch

from zeroblock.bench.operation import name_of
from zeroblock.bench.script import append, machine, positive, seconds, writable
from zeroblock.engine.pack import pack
from zeroblock.ops.attention.reference import dense
from zeroblock.task.encoding import Encoded

EXAMPLES = (4, 16, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=positive, default=32)
    parser.add_argument("--size", type=positive, default=64, help="size of a head")
    parser.add_argument("--csv", help="append the rows to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("the attention kernel needs a CUDA device")
    from zeroblock.ops.attention.triton import packed

    if args.csv:
        writable(args.csv)
    rows = []
    print(f"{machine('cuda')}, torch {torch.__version__}, {args.heads} heads of {args.size}")
    for examples in EXAMPLES:
        batch = [Encoded((first, *range(63)), ((1, 2, 3), (4, 5))) for first in range(examples)]
        row = pack(batch).to(torch.device("cuda"))
        mask, scale = row.sees(), args.size**-0.5
        for dtype in (torch.float32, torch.bfloat16):
            shape = (2, args.heads, len(row.tokens), args.size)
            q, k, v = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
            plain = seconds(lambda q=q, k=k, v=v: dense(q, k, v, mask, scale, None), "cuda")  # noqa: B023
            taken = seconds(lambda q=q, k=k, v=v: packed(q, k, v, row, scale, None, None), "cuda")  # noqa: B023
            rows.append(
                {
                    "tokens": len(row.tokens),
                    "dtype": name_of(dtype),
                    "heads": args.heads,
                    "size": args.size,
                    "ms": round(taken * 1e3, 3),
                    "dense_ms": round(plain * 1e3, 3),
                    "speedup_over_dense": round(plain / taken, 2),
                }
            )
            print(f"{len(row.tokens):6} tokens {name_of(dtype):9} {taken * 1e3:8.3f} ms, dense {plain * 1e3:8.3f} ms")
    append(args.csv, rows, "cuda")


if __name__ == "__main__":
    main()
