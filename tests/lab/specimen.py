"""An adaptive run by ``ZeroOrder`` on a quadratic whose blocks differ, for tests of its diagnosis."""

from __future__ import annotations

from zeroblock.block import Block
from zeroblock.estimator import TwoSided
from zeroblock.lab.adaptive import Seen
from zeroblock.lab.descent import start
from zeroblock.lab.quadratic import Quadratic, hessian
from zeroblock.optimizer import ZeroOrder
from zeroblock.schedule import Adaptive


def adaptive_run(n: int, steps: int, schedule: Adaptive, seed: int = 0) -> list[Seen]:
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
