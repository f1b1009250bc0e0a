"""Throughput of the noise kernels against torch.normal + add and against a plain copy.

    python bench/noise.py [--device cpu|cuda] [--numel N] [--csv results/noise.csv]

Bytes are those of the weights, read and written once; a ratio compares rows of one run.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from zeroblock import ops
from zeroblock.bench.operation import Operations, arguments, table
from zeroblock.noise import Distribution, Draw, Key, Rounding


def operations(x: Tensor) -> Operations:
    steps, size = itertools.count(), x.element_size()

    def baseline() -> object:
        return x.add_(torch.normal(0.0, 1.0, x.shape, device=x.device, dtype=x.dtype), alpha=1e-6)

    def add(distribution: Distribution = Distribution.NORMAL, rounding: Rounding = Rounding.STOCHASTIC) -> object:
        return ops.add_noise_(x, Draw(Key(0, next(steps)), distribution=distribution), 1e-6, rounding=rounding)

    return {
        "torch.normal + add_": (baseline, 2 * size),
        "add_noise_": (add, 2 * size),
        "add_noise_, nearest": (lambda: add(rounding=Rounding.NEAREST), 2 * size),
        "add_noise_, Rademacher": (lambda: add(Distribution.RADEMACHER), 2 * size),
        "perturb_pair": (lambda: ops.perturb_pair(x, Draw(Key(0, next(steps))), 1e-3), 3 * size),
    }


if __name__ == "__main__":
    table(arguments(__doc__), operations, "torch.normal + add_")
