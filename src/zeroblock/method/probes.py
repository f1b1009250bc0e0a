"""Methods that weigh several probes of a step, or read earlier steps: FZOO, EGGROLL, MeZO-Greedy, AdaMeZO, SVRG."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..block import Partition, layers, whole
from ..errors import ZeroBlockError
from ..estimator import Anchored, Greedy, Standardized
from ..noise import Distribution
from ..optimizer import ZeroOrder
from ..rule import AnchorSGD, RecallAdam
from ..subspace import Outer
from .paper import mezo_bcd
from .table import distance, method

FZOO = (
    "Dang et al. 2025, FZOO: Fast Zeroth-Order Optimizer for Fine-Tuning Large Language Models towards Adam-Scale Speed"
)
EGGROLL = "Sarkar et al. 2025, Evolution Strategies at the Hyperscale"
GREEDY = (
    "Jin et al. 2026, Steering the Noise: Turning Random Perturbations into Effective Descent for Memory-Efficient LLM "
    "Fine-Tuning"
)
ADAMEZO = (
    "Cai et al. 2026, AdaMeZO: Adam-style Zeroth-Order Optimizer for LLM Fine-tuning Without Maintaining the Moments"
)
SVRG = "Gautam et al. 2024, Variance-reduced Zeroth-Order Methods for Fine-Tuning Language Models"


@method(FZOO)
def fzoo(
    model: nn.Module,
    lr: float | None = None,
    eps: float | None = None,
    *,
    probes: int = 8,
    partition: Partition = whole,
    as_published: bool = False,
    **options: Any,
) -> ZeroOrder:
    """Divide one-sided differences along random signs by the standard deviation of the probes' losses.

        θ ← θ - lr/n · Σᵢ (l_i - l_0)/σ · u_i,    l_i = L(θ + ε u_i),  l_0 = L(θ),  σ² = Σᵢ (l_i - mean)²/(n - 1)

    A step moves every weight by about lr/√n, whatever the scale of the loss.  The paper's equation has another factor
    1/ε, which its code leaves out.  ``as_published`` takes σ² over n, as that code does.  (The code also has a variant
    that reuses the losses of the last step, which is left out.)
    """
    options = {"distribution": Distribution.RADEMACHER, **options}
    estimator = Standardized(distance(eps, lr), probes, population=as_published)
    return mezo_bcd(model, lr, partition=partition, estimator=estimator, **options)


@method(FZOO)
def fzoo_bcd(
    model: nn.Module,
    lr: float | None = None,
    eps: float | None = None,
    *,
    partition: Partition = layers,
    **options: Any,
) -> ZeroOrder:
    """FZOO on one block per step, where all probes share the part of the pass before the block."""
    return fzoo(model, lr, eps, partition=partition, **options)


@method(EGGROLL)
def eggroll(
    model: nn.Module,
    lr: float | None = None,
    eps: float | None = None,
    *,
    probes: int = 8,
    rank: int = 1,
    partition: Partition = whole,
    as_published: bool = False,
    **options: Any,
) -> ZeroOrder:
    """Evolution strategy whose members are W ± ε·A Bᵀ/√r, with A and B drawn for every pair and fitness standardized.

        W ← W - lr/n · Σᵢ (l_i⁺ - l_i⁻)/2σ · A_i B_iᵀ/√r,    σ: standard deviation of all 2n losses

    Vectors take dense noise.  The published code multiplies the step by ε·√(2n), which is a matter of lr.
    ``as_published`` takes σ² over 2n and adds its 1e-5, so that losses closer together than 0.003 are not amplified to
    unit variance; its fitness is a reward of about 1.
    """
    estimator = Standardized(
        distance(eps, lr), probes, sides=2, floor=1e-5 if as_published else 0.0, population=as_published
    )
    return mezo_bcd(model, lr, partition=partition, estimator=estimator, subspace=Outer(rank), **options)


@method(GREEDY)
def mezo_greedy(
    model: nn.Module,
    lr: float | None = None,
    eps: float | None = None,
    *,
    probes: int = 4,
    partition: Partition = whole,
    as_published: bool = False,
    **options: Any,
) -> ZeroOrder:
    """Take, of several directions, the one that leads to the lowest loss, and move along it as MeZO does.

        z* = argmin over z_i of L(θ ± ε z_i),    θ ← θ - lr · (L(θ + ε z*) - L(θ - ε z*))/2ε · z*

    Both sides of all directions are measured together, 2n evaluations in one forked pass, and all of them choose.
    ``as_published`` chooses by L(θ + ε z_i) alone; the paper measures these n first and the two sides of z* after.
    """
    estimator = Greedy(distance(eps, lr), probes, as_published=as_published)
    return mezo_bcd(model, lr, partition=partition, estimator=estimator, **options)


@method(ADAMEZO)
def adamezo(
    model: nn.Module,
    lr: float | None = None,
    eps: float | None = None,
    *,
    window: int = 10,
    betas: tuple[float, float] = (0.7, 0.9),
    partition: Partition = whole,
    as_published: bool = False,
    **options: Any,
) -> ZeroOrder:
    """Adam whose moments are rebuilt at every step from the last ``window`` coefficients and their noise.

        m = Σᵢ β₁ⁱ g₋ᵢ / Σᵢ β₁ⁱ,  v = Σᵢ β₂ⁱ g₋ᵢ² / Σᵢ β₂ⁱ,  θ ← θ - lr · m / (√v + 1e-8),    g₋ᵢ = c₋ᵢ·z₋ᵢ

    It keeps ``window`` numbers per tensor instead of moments, and draws the block's noise ``window`` times per step.
    ``as_published`` takes MeZO's steps until the window is full and then 100·Σβ₁ⁱg₋ᵢ/(√Σβ₂ⁱg₋ᵢ² + 1e-5), as its code
    does; the paper's equation is Adam's without bias correction.  With blocks, the window covers a block's own visits.
    """
    if as_published and lr is None:
        raise ZeroBlockError("adamezo as published takes steps of two sizes, a hundred apart: give lr")
    rule = RecallAdam(window, betas, as_published=as_published)
    return mezo_bcd(model, lr, eps, partition=partition, rule=rule, **options)


@method(SVRG)
def mezo_svrg(
    model: nn.Module,
    lr: float | None = None,
    eps: float | None = None,
    *,
    probes: int = 1,
    interval: int = 2,
    boost: float = 1.0,
    batches: int = 8,
    partition: Partition = whole,
    **options: Any,
) -> ZeroOrder:
    """Reduce the variance of small batches by an anchor θ̃, whose estimate comes from a large one (SVRG).

        first step of a turn:   θ̃ = θ,  g̃ = ĝ(θ̃; large batch, z̃),    θ ← θ - lr·boost·g̃
        later steps:            θ ← θ - lr · [ĝ(θ; batch, z) - ĝ(θ̃; batch, z) + g̃],    ĝ: two-sided estimate along z

    A turn is ``interval`` steps, so with blocks the anchor is a copy of the active block, with as many bytes as its
    weights.  Give the large batch as ``optimizer.step(closure, anchor=closure)``; ``zeroblock train``
    joins ``batches`` batches.  The published code copies the list of tensors and not the tensors, so that its anchor
    is always the current θ, and draws another z there; this is not reproduced.
    """
    options = {"rule": AnchorSGD(boost), "interval": interval, **options}
    return mezo_bcd(model, lr, partition=partition, estimator=Anchored(distance(eps, lr), probes, batches), **options)
