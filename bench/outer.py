"""Throughput of adding an outer product, or a given change, against torch and against a plain copy.

    python bench/outer.py [--device cpu|cuda] [--numel N] [--csv results/outer.csv]

The weights are a square matrix of at most N elements, the product has rank 2.  Bytes are those of the weights, read
and written once, and of the change where there is one; a ratio compares rows of one run.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from zeroblock import ops
from zeroblock.bench.operation import Operations, arguments, table
from zeroblock.noise import Draw, Key

RANK = 2


def operations(x: Tensor) -> Operations:
    steps, size, side = itertools.count(), x.element_size(), math.isqrt(x.numel())
    matrix = x.view(side, side)
    z, v = (torch.randn(side, RANK, device=x.device) for _ in range(2))
    narrow_z, narrow_vt = z.to(x.dtype), v.T.to(x.dtype)
    delta = torch.randn_like(matrix, dtype=torch.float32)

    def draw() -> Draw:
        return Draw(Key(0, next(steps)))

    return {
        "torch.addmm_": (lambda: matrix.addmm_(narrow_z, narrow_vt, alpha=1e-6), 2 * size),
        "add_outer_": (lambda: ops.add_outer_(matrix, z, v, 1e-6, draw()), 2 * size),
        "add_": (lambda: ops.add_(matrix, delta, 1e-6, draw()), 2 * size + delta.element_size()),
    }


if __name__ == "__main__":
    args = arguments(__doc__)
    args.numel = math.isqrt(args.numel) ** 2
    table(args, operations, "torch.addmm_")
