"""A run of subspace ZO-SGD on a quadratic by ``zeroblock.ZeroOrder``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..errors import ZeroBlockError
from .projection import Projection
from .quadratic import Hessian


def start(dim: int, seed: int) -> Tensor:
    """θ₀ ~ N(0, I), (d,), fp64."""
    return torch.randn(dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 + seed))


def descend(
    hessian: Hessian, projection: Projection, *, lr: float, eps: float, steps: int, seed: int, origin: int | None = None
) -> np.ndarray:
    """Take ``steps`` steps from a random start and return the loss before each and after the last, (steps + 1,).

    Args:
        hessian: the Hessian of the quadratic.
        projection: draws the directions.
        lr: learning rate.
        eps: smoothing.
        steps: number of steps.
        seed: the seed of the projections and the noise, and of the start if ``origin`` is None.
        origin: seed of the start.
    """
    if steps < 1:
        raise ZeroBlockError(f"steps must be at least 1, got {steps}")
    optimizer = projection.optimizer(hessian, start(hessian.dim, seed if origin is None else origin), lr, eps, seed)
    losses = [float(optimizer.model().detach())]
    for _ in range(steps):
        optimizer.step(optimizer.model)
        losses.append(float(optimizer.model().detach()))
    return np.array(losses)
