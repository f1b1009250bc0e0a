"""Throughput of one step of Adam against torch's on noise that is materialised, and against a plain copy.

    python bench/adam.py [--device cpu|cuda] [--numel N] [--csv results/adam.csv]

Bytes are those of weights and moments, read and written once; a ratio compares rows of one run.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from zeroblock import ops
from zeroblock.bench.operation import Operations, arguments, table
from zeroblock.noise import Draw, Key

SCALARS = (1.0, -1e-6, 1.0, 1.0, 0.1)  # taken, -lr, both corrections, one share
BETAS, EPS = (0.9, 0.999), 1e-8


def operations(x: Tensor) -> Operations:
    steps, size = itertools.count(), x.element_size()
    theirs = torch.nn.Parameter(x)
    optimizer = torch.optim.Adam([theirs], lr=1e-6, betas=BETAS, eps=EPS)

    def baseline() -> None:
        theirs.grad = torch.normal(0.0, 0.1, x.shape, device=x.device, dtype=x.dtype)
        optimizer.step()

    named: Operations = {"torch.normal + Adam": (baseline, 6 * size)}
    for dtype in (torch.float32, torch.bfloat16):
        m, v = torch.zeros_like(x, dtype=dtype), torch.zeros_like(x, dtype=dtype)

        def step(m: Tensor = m, v: Tensor = v) -> object:
            return ops.adam_(x, m, v, Draw(Key(0, next(steps))), SCALARS, betas=BETAS, eps=EPS)

        named[f"adam_, moments in {str(dtype).removeprefix('torch.')}"] = (step, 2 * size + 4 * dtype.itemsize)
    return named


if __name__ == "__main__":
    table(arguments(__doc__), operations, "torch.normal + Adam")
