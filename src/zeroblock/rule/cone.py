"""Directions from a cone around a momentum."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..basis import CHUNK, Shaped
from ..direction import Member
from ..errors import ZeroBlockError
from ..state import State
from .base import RULES, Rule


@RULES.register
@dataclasses.dataclass(frozen=True)
class Cone(Rule):
    """Directions √d·cos θ·m/‖m‖ + sin θ·z, δ = g, and m ← β·m + (1 - β)·g (ConMeZO).

    m, of d coordinates, covers all active tensors together.  The first direction is z alone.

    Args:
        theta: θ in (0, π/2], the angle between direction and momentum; π/2 is MeZO.
        beta: β in [0, 1).
        warmup: steps over which β rises, counted by the state: 0.1 for a tenth of them, then
            β - (β - 0.1)/(1 + 8p)³ with p = (share of the rest)^1.8.
        reset: forget m at the start of every turn; by default it is kept and carried from basis to basis.
    """

    theta: float = 1.35
    beta: float = 0.95
    warmup: int = 0
    reset: bool = False
    state = ("m",)
    divisible = False  # the norm covers all parts

    def __post_init__(self) -> None:
        if not 0 < self.theta <= math.pi / 2:
            raise ZeroBlockError(f"Cone: theta must be in (0, π/2], got {self.theta}")
        if not 0 <= self.beta < 1:
            raise ZeroBlockError(f"Cone: beta must be in [0, 1), got {self.beta}")
        if self.warmup < 0:
            raise ZeroBlockError(f"Cone: warmup must not be negative, got {self.warmup}")

    def beta_at(self, t: int) -> float:
        """β of the t-th step, counting from 1."""
        first = self.warmup / 10
        if not self.warmup or t > self.warmup + 1:
            return self.beta
        share = max(0.0, (t - 1 - first) / (self.warmup - first))
        rise: float = (1 + 8 * share**1.8) ** 3
        return self.beta - (self.beta - 0.1) / rise

    def delta(self, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        beta = self.beta_at(t)
        state["m"].mul_(beta).add_(g, alpha=1 - beta)
        return g

    def shaped(self, members: Sequence[Member], state: State) -> Sequence[Member]:
        moments = [state.known(member).get("m") for member in members]
        norm = length([m for m in moments if m is not None])
        if not norm:
            return members
        pull = math.cos(self.theta) * math.sqrt(sum(member.basis.size for member in members)) / norm

        def shape(m: Tensor, z: Tensor, span: slice) -> Tensor:
            return z.mul_(math.sin(self.theta)).add_(m[span], alpha=pull)

        return [
            member if m is None else member._replace(basis=Shaped(member.basis, functools.partial(shape, m)))
            for member, m in zip(members, moments, strict=True)
        ]

    def moved(self, members: Sequence[Member], state: State) -> Sequence[Member]:
        return self.shaped(members, state)  # with the norm of all blocks, before any has moved


def length(tensors: Sequence[Tensor]) -> float:
    """‖x‖ of all tensors together; summed in fp64 and rounded to fp32, so that the order of the sum hardly matters."""
    pieces = [part for x in tensors for part in x.split(CHUNK if x.is_cuda else max(4096, min(CHUNK, x.numel() // 16)))]
    if not pieces:
        return 0.0
    squares = torch.stack([part.double().square_().sum().to(pieces[0].device) for part in pieces])
    return float(squares.sum().sqrt().float())
