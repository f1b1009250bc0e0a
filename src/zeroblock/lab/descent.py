"""A run of subspace ZO-SGD on a quadratic, by ``zeroblock.ZeroOrder``, and what is seen along it."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from ..errors import ZeroBlockError
from . import alignment
from .projection import Projection
from .quadratic import Hessian, Quadratic

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a run saw; entry t of an array belongs to θ_t.

    Args:
        loss: (steps + 1,), ½ θᵀHθ.
        gradient: (steps + 1,), ‖∇L(θ_t)‖².
        rho: ρ_t at every ``every``-th step.
    """

    loss: Array
    gradient: Array
    rho: Array

    @property
    def mean_rho(self) -> float:
        """ρ̄."""
        return float(self.rho.mean())

    @property
    def max_rho(self) -> float:
        """ρmax."""
        return float(self.rho.max())


def start(dim: int, seed: int) -> Tensor:
    """θ₀ ~ N(0, I), (d,), fp64."""
    return torch.randn(dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 + seed))


def descend(
    hessian: Hessian,
    projection: Projection,
    *,
    lr: float,
    eps: float,
    steps: int,
    seed: int,
    origin: int | None = None,
    target: float | None = None,
    at_least: int = 0,
    every: int = 10,
) -> Trace:
    """Take ``steps`` steps from a random start.

    Args:
        hessian: of the quadratic.
        projection: where directions are drawn.
        lr: learning rate.
        eps: smoothing.
        steps: at most so many.
        seed: of the projections and the noise, and of the start unless ``origin`` is.
        origin: seed of the start.
        target: stop once the loss is at or below it, ...
        at_least: ... but not before so many steps.
        every: how often ρ_t is measured.
    """
    if steps < 1 or every < 1:
        raise ZeroBlockError(f"steps and every must be at least 1, got {steps} and {every}")
    optimizer = projection.optimizer(hessian, start(hessian.dim, seed if origin is None else origin), lr, eps, seed)
    model = optimizer.model
    assert isinstance(model, Quadratic)
    losses, gradients, rhos = [], [], []

    def look() -> None:
        theta = model.point().detach()
        gradient = hessian @ theta
        losses.append(float(theta @ gradient) / 2)
        gradients.append(float(gradient @ gradient))

    for t in range(steps):
        look()
        if target is not None and losses[-1] <= target and t >= at_least:
            break
        if t % every == 0:
            rhos.append(alignment.current(optimizer, hessian))
        optimizer.step(model)
    else:
        look()
    return Trace(np.array(losses), np.array(gradients), np.array(rhos))
