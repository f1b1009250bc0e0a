"""Rules: from an estimate c·z in coordinates to a step δ in coordinates.

    θ ← (1 - lr·λ)·θ - lr·Pδ

State lives in coordinates, so a block's state is block-sized and a low-rank
one's m×r.  It is fp32, flat, and handed to the rule span by span.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from torch import Tensor

from .errors import ZeroBlockError


class Rule(Protocol):
    """How an estimate becomes a step.

    ``state`` names the tensors it keeps per tensor of weights, as many elements as coordinates;
    ``reset`` drops them at the start of every turn.
    """

    @property
    def state(self) -> tuple[str, ...]: ...

    @property
    def reset(self) -> bool: ...

    def delta(self, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        """δ of shape g; may overwrite g; updates ``state`` in place; t counts from 1 since the state was zero."""
        ...


@dataclasses.dataclass(frozen=True)
class SGD:
    """δ = g.  Over Full and sparse subspaces this is one fused pass that never materialises g."""

    state = ()
    reset = False

    def delta(self, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        return g


@dataclasses.dataclass(frozen=True)
class Sign:
    """δ = sign(g): ZO-signSGD."""

    state = ()
    reset = False

    def delta(self, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        return g.sign_()


@dataclasses.dataclass(frozen=True)
class Momentum:
    """m ← β·m + (1 - β)·g, δ = m.

    Args:
        beta: β in [0, 1).
        reset: forget m at the start of every turn; kept by default, and carried from basis to basis.
    """

    beta: float = 0.9
    reset: bool = False
    state = ("m",)

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ZeroBlockError(f"Momentum: beta must be in [0, 1), got {self.beta}")

    def delta(self, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        return state["m"].mul_(self.beta).add_(g, alpha=1 - self.beta)


@dataclasses.dataclass(frozen=True)
class Adam:
    """m̂ / (√v̂ + eps), with the moments of c·z per coordinate.

    Args:
        betas: decay of the first and second moment.
        eps: added to the root.
        reset: forget both at the start of every turn (MeZO-BCD + Adam), or keep them (MeZO + Adam).
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    reset: bool = True
    state = ("m", "v")

    def __post_init__(self) -> None:
        if not all(0 <= b < 1 for b in self.betas):
            raise ZeroBlockError(f"Adam: betas must be in [0, 1), got {self.betas}")

    def corrections(self, t: int) -> tuple[float, float]:
        """What the moments are multiplied with after t steps, for having started at zero."""
        return 1 / (1 - self.betas[0] ** t), 1 / (1 - self.betas[1] ** t)

    def delta(self, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        b1, b2 = self.betas
        m = state["m"].mul_(b1).add_(g, alpha=1 - b1)
        v = state["v"].mul_(b2).addcmul_(g, g, value=1 - b2)
        root = torch.sqrt(v / (1 - b2**t)).add_(self.eps)
        return torch.div(m, root.mul_(1 - b1**t), out=g)
