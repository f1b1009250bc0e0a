"""Methods that shape their directions or steps: by curvature, by a momentum, by frames, by orthogonalisation.

Each takes ``partition=zb.layers`` as well, which none of the papers has.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..block import Partition, whole
from ..estimator import Curvature, OneSided
from ..noise import Rounding
from ..optimizer import ZeroOrder
from ..rule import Cone, Hessian, Muon
from ..subspace import Frames
from .paper import mezo_bcd
from .table import distance, method

HIZOO = "Zhao et al. 2024, Second-Order Fine-Tuning without Pain for LLMs: A Hessian Informed Zeroth-Order Optimizer"
CONMEZO = "Behric et al. 2025, ConMeZO: Adaptive Descent-Direction Sampling for Gradient-Free Finetuning of LLMs"
MUON = "Lang et al. 2026, Powering Up Zeroth-Order Training via Subspace Gradient Orthogonalization"
SUBZERO = "Yu et al. 2024, Zeroth-Order Fine-Tuning of LLMs in Random Subspaces"

IN_PLACE: dict[str, Any] = {"restore": "subtract", "rounding": Rounding.NEAREST}
"""The published codes of these methods perturb the weights in place and round to nearest."""


@method(HIZOO)
def hizoo(
    model: nn.Module,
    lr: float | None = None,
    eps: float | None = None,
    *,
    alpha: float = 1e-8,
    probes: int = 1,
    partition: Partition = whole,
    reset: bool = False,
    as_published: bool = False,
    **options: Any,
) -> ZeroOrder:
    """Scale directions and steps by a diagonal of the Hessian, which a third point measures: four bytes per weight.

        c = (L(θ + εz/√h) - L(θ - εz/√h)) / 2ε        κ = (L(θ + εz/√h) + L(θ - εz/√h) - 2·L(θ)) / ε²
        h ← (1 - α)·h + α·|½κ|·h·z²                   θ ← θ - lr·c·z/√h

    α = 1e-8 is the authors' value for OPT; with curvatures in the tens it leaves h near 1 for thousands of steps.
    ``reset=True`` with ``partition=zb.layers`` and an ``interval`` keeps the state of one block at a time.
    ``as_published`` follows the authors' code, whose scale σ of the directions (√σ·z) is moved by α towards
    |½κ|·z²/σ: it grows with the curvature, while the paper's shrinks.
    """
    if as_published:
        options = {**IN_PLACE, **options}
    rule = Hessian(alpha, reset, as_published)
    return mezo_bcd(
        model, lr, partition=partition, estimator=Curvature(distance(eps, lr), probes), rule=rule, **options
    )


@method(CONMEZO)
def conmezo(
    model: nn.Module,
    lr: float | None = None,
    eps: float | None = None,
    *,
    theta: float = 1.35,
    beta: float = 0.95,
    partition: Partition = whole,
    reset: bool = False,
    as_published: bool = False,
    **options: Any,
) -> ZeroOrder:
    """Draw directions from a cone around a momentum of the estimates: four bytes per weight.

        u = √d·cos(θ)·m/‖m‖ + sin(θ)·z        g = c·u        m ← β·m + (1 - β)·g        θ ← θ - lr·g

    ``as_published`` lets β rise from 0.1 over the first 2,000 steps, as the authors' code does, and restores by
    subtraction.  That code also begins with a random momentum and takes the expected norm for ‖m‖, which we do not.
    """
    if as_published:
        options = {**IN_PLACE, **options}
    rule = Cone(theta, beta, 2000 if as_published else 0, reset)
    return mezo_bcd(model, lr, eps, partition=partition, rule=rule, **options)


@method(SUBZERO)
def subzero(
    model: nn.Module,
    lr: float | None = None,
    eps: float | None = None,
    *,
    rank: int = 64,
    interval: int = 1000,
    scaled: bool = True,
    partition: Partition = whole,
    as_published: bool = False,
    **options: Any,
) -> ZeroOrder:
    """Draw directions U z Vᵀ with z of r×r between orthonormal frames that are held for ``interval`` steps.

    The paper has no factor on U z Vᵀ; the authors' code multiplies by √(m·n)/r, and its learning rates assume
    that, so it is the default here (``scaled``).  ``as_published`` restores by subtraction and rounds to nearest.
    """
    if as_published:
        options = {**IN_PLACE, **options}
    subspace = Frames(rank, both=True, scaled=scaled)
    return mezo_bcd(model, lr, eps, partition=partition, subspace=subspace, interval=interval, **options)


@method(MUON)
def zo_muon(
    model: nn.Module,
    lr: float | None = None,
    eps: float | None = None,
    *,
    rank: int = 64,
    probes: int = 4,
    interval: int = 100,
    vectors: float = 1e-5,
    partition: Partition = whole,
    as_published: bool = False,
    **options: Any,
) -> ZeroOrder:
    """Orthogonalise the mean estimate of a few queries in a subspace of rows, U z with z of r×n.

        c_k = (L(θ + εU z_k) - L(θ)) / ε        G = mean of c_k·z_k        θ ← θ - lr·U msign(G)

    msign is five Newton-Schulz iterations, which fix the size of a step: lr is 0.01 unless you give one.  Vectors take
    a plain step with lr·``vectors``; the authors' code uses 1e-7 for them, whatever lr is.
    ``as_published`` restores by subtraction and rounds to nearest.
    """
    lr = 1e-2 if lr is None else lr
    if as_published:
        options = {**IN_PLACE, **options}
    return mezo_bcd(
        model, lr, partition=partition, subspace=Frames(rank, both=False, scaled=False), interval=interval,
        estimator=OneSided(distance(eps, lr), probes), rule=Muon(vectors=vectors), **options,
    )  # fmt: skip
