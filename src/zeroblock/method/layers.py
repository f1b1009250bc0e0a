"""Methods that perturb and move some layers per step: LeZO at random, AdaLeZO as a bandit."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..optimizer import ZeroOrder
from ..schedule import Bandit, Subset
from .paper import mezo_bcd
from .table import method

LEZO = (
    "Wang et al. 2024, Simultaneous Computation and Memory Efficient Zeroth-Order Optimizer for Fine-Tuning Large "
    "Language Models"
)
ADALEZO = "Wang et al. 2026, Universally Empowering Zeroth-Order Optimization via Adaptive Layer-wise Sampling"


@method(LEZO)
def lezo(
    model: nn.Module, lr: float | None = None, eps: float | None = None, *, keep: float = 0.25, **options: Any
) -> ZeroOrder:
    """Perturb and move a random quarter of the layers per step.

        z' = z on the chosen layers, 0 elsewhere        θ ← θ - lr·c·z'

    ``keep`` is 1 - ρ of the paper, whose sparsity ρ is 0.75.  Embeddings and norms outside the layers are blocks like
    the layers; the subset is drawn anew in every turn, and the step is not corrected for it.
    """
    return mezo_bcd(model, lr, eps, schedule=Subset(keep), **options)


@method(ADALEZO)
def adalezo(
    model: nn.Module,
    lr: float | None = None,
    eps: float | None = None,
    *,
    keep: float = 0.2,
    temperature: float = 0.2,
    decay: float = 0.1,
    floor: float = 0.01,
    limit: float = 32.0,
    **options: Any,
) -> ZeroOrder:
    """Draw layers as a bandit that prefers large coefficients, and weigh each by its inverse probability.

        p = (1 - floor)·softmax((z̄ / max z̄) / temperature) + floor/N        k = ⌊keep·N⌋ draws with replacement
        θ_j ← θ_j - lr·(draws of j)·min(limit, 1/(k·p_j))·c·z_j

    The reward z̄_j of a layer is the moving average of |c| over the steps that it took part in.  The defaults are
    those of a public implementation, whose scaling by layer (``layer_momentum``, off by default) is left out.
    """
    return mezo_bcd(model, lr, eps, schedule=Bandit(keep, temperature, decay, floor, limit), **options)
