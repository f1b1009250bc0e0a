"""The methods of the MeZO-BCD paper's tables: MeZO, MeZO-BCD, LOZO, SparseMeZO, and their rules."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..block import Partition, layers, whole
from ..estimator import Estimator
from ..noise import Rounding
from ..optimizer import ZeroOrder
from ..rule import Adam, Momentum, Sign
from ..schedule import Adaptive, Ascending, Schedule, Shuffled
from ..subspace import LowRank, Sparse
from .table import measured, method

MEZO = "Malladi et al. 2023, Fine-Tuning Language Models with Just Forward Passes"
BCD = "Park et al. 2025, Elucidating Subspace Perturbation in Zeroth-Order Optimization: Theory and Practice at Scale"
LOZO = "Chen et al. 2024, Enhancing Zeroth-order Fine-tuning for Language Models with Low-rank Structures"
SPARSE = "Liu et al. 2024, Sparse MeZO: Less Parameters for Better Performance in Zeroth-Order LLM Fine-Tuning"
SIGN = "Liu et al. 2019, signSGD via Zeroth-Order Oracle"
MOMENTUM = "Zhang et al. 2024, Revisiting Zeroth-Order Optimization for Memory-Efficient LLM Fine-Tuning"


@method(MEZO)
def mezo(
    model: nn.Module,
    lr: float | None = None,
    eps: float | None = None,
    *,
    probes: int = 1,
    estimator: Estimator | None = None,
    as_published: bool = False,
    **options: Any,
) -> ZeroOrder:
    """Perturb and move every weight at once.

    ``as_published`` restores by subtraction and rounds to nearest, so that 16-bit weights drift.
    """
    if as_published:
        options = {"restore": "subtract", "rounding": Rounding.NEAREST, **options}
    return ZeroOrder(model, lr, partition=whole, estimator=measured(estimator, eps, probes, lr), **options)


@method(MEZO)
def mezo_adam(
    model: nn.Module, lr: float | None = None, eps: float | None = None, *, rule: Adam | None = None, **options: Any
) -> ZeroOrder:
    """MeZO with Adam's moments of every weight, kept: eight bytes per weight."""
    return mezo(model, lr, eps, rule=rule or Adam(reset=False), **options)


@method(BCD)
def mezo_bcd(
    model: nn.Module,
    lr: float | None = None,
    eps: float | None = None,
    *,
    probes: int = 1,
    partition: Partition = layers,
    schedule: Schedule | None = None,
    estimator: Estimator | None = None,
    **options: Any,
) -> ZeroOrder:
    """Perturb and move one block per step, each block once per cycle in random order."""
    schedule, estimator = schedule or Shuffled(), measured(estimator, eps, probes, lr)
    return ZeroOrder(model, lr, partition=partition, schedule=schedule, estimator=estimator, **options)


@method(BCD)
def mezo_bcd_adaptive(
    model: nn.Module,
    lr: float | None = None,
    eps: float | None = None,
    *,
    probes: int = 1,
    partition: Partition = layers,
    schedule: Adaptive | None = None,
    as_published: bool = False,
    **options: Any,
) -> ZeroOrder:
    """MeZO-BCD that visits blocks with large coefficients more often.

    ``as_published`` averages signed coefficients after an ascending warm-up, as in the paper's algorithm.
    """
    schedule = schedule or (Adaptive(signed=True, first=Ascending()) if as_published else Adaptive())
    return mezo_bcd(model, lr, eps, probes=probes, partition=partition, schedule=schedule, **options)


@method(BCD)
def mezo_bcd_adam(
    model: nn.Module,
    lr: float | None = None,
    eps: float | None = None,
    *,
    interval: int = 50,
    rule: Adam | None = None,
    **options: Any,
) -> ZeroOrder:
    """MeZO-BCD that holds a block for ``interval`` steps of Adam, then forgets the moments."""
    return mezo_bcd(model, lr, eps, interval=interval, rule=rule or Adam(reset=True), **options)


@method(LOZO)
def lozo(
    model: nn.Module,
    lr: float | None = None,
    eps: float | None = None,
    *,
    rank: int = 2,
    interval: int = 50,
    as_published: bool = False,
    **options: Any,
) -> ZeroOrder:
    """Draw directions U Vᵀ of low rank, with V held for ``interval`` steps.

    ``as_published`` updates along another U than it measured, on the steps that draw V.
    """
    return mezo(model, lr, eps, subspace=LowRank(rank, as_published), interval=interval, **options)


@method(LOZO)
def lozo_m(
    model: nn.Module, lr: float | None = None, eps: float | None = None, *, beta: float = 0.9, **options: Any
) -> ZeroOrder:
    """LOZO with momentum of m×r coordinates, carried from one V to the next."""
    return lozo(model, lr, eps, rule=Momentum(beta), **options)


@method(SPARSE)
def sparse_mezo(
    model: nn.Module, lr: float | None = None, eps: float | None = None, *, keep: float = 0.75, **options: Any
) -> ZeroOrder:
    """MeZO on the weights of small magnitude; ``keep`` is the percentile that SparseMeZO calls its sparsity."""
    return mezo(model, lr, eps, subspace=Sparse(keep), **options)


@method(SIGN)
def zo_sign(
    model: nn.Module, lr: float | None = None, eps: float | None = None, *, partition: Partition = whole, **options: Any
) -> ZeroOrder:
    """Move every active coordinate by lr, against the sign of its estimate."""
    return mezo_bcd(model, lr, eps, partition=partition, rule=Sign(), **options)


@method(MOMENTUM)
def zo_momentum(
    model: nn.Module,
    lr: float | None = None,
    eps: float | None = None,
    *,
    beta: float = 0.9,
    partition: Partition = whole,
    **options: Any,
) -> ZeroOrder:
    """Heavy-ball momentum of the estimates."""
    return mezo_bcd(model, lr, eps, partition=partition, rule=Momentum(beta), **options)
