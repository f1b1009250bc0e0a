"""Runs by ``ZeroOrder`` on quadratics, and the alignment that an optimizer is about to use."""

from __future__ import annotations

import torch

from zeroblock.block import Block
from zeroblock.estimator import TwoSided
from zeroblock.lab import alignment
from zeroblock.lab.adaptive import Seen
from zeroblock.lab.descent import start
from zeroblock.lab.projection import Orthonormal
from zeroblock.lab.quadratic import Hessian, Quadratic, hessian
from zeroblock.noise import Key
from zeroblock.optimizer import ZeroOrder
from zeroblock.schedule import Schedule


def adaptive_run(n: int, steps: int, schedule: Schedule, seed: int = 0) -> list[Seen]:
    """The curvatures of the n blocks fall from 4 to 0.4; each descends at its own pace, so the preference moves."""
    h = hessian(8 * n, 8, [4 * 0.1 ** (i / max(1, n - 1)) for i in range(n)], seed=seed)
    model = Quadratic(h, start(h.dim, seed), 8)
    blocks = [Block(name, (name,)) for name, _ in model.named_parameters()]
    optimizer = ZeroOrder(model, 0.02, partition=blocks, schedule=schedule, estimator=TwoSided(1e-4), seed=seed)
    seen = []
    for _ in range(steps):
        optimizer.step(model)
        assert optimizer.record is not None
        seen.append(Seen(optimizer.record.step, optimizer.record.block, optimizer.record.coeffs))
    return seen


def current_alignment(optimizer: ZeroOrder, hessian: Hessian) -> float:
    """ρ_t of the M that an optimizer of a quadratic takes its next step with."""
    total = 0.0
    for name, param, basis in optimizer.members:
        if isinstance(basis, Orthonormal):
            total += alignment.alignment(hessian, basis.columns)
            continue
        # an element that takes noise moves: a normal number is never zero
        moved = basis.perturbed(torch.zeros_like(param), Key(0, 0), 1.0) != 0
        first = optimizer.offsets[name]
        total += float(hessian.diagonal[first : first + param.numel()][moved].sum()) / hessian.top
    return total
