"""Parts that a stranger might bring: each is one class and one line that registers it.

``test_parts.py`` runs them, and every part of the library, through all the ways a step can take.
CONTRIBUTING.md shows this file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroblock.basis import Basis, Site
from zeroblock.direction import Direction, Point
from zeroblock.estimator import ESTIMATORS, FiniteDifference
from zeroblock.noise import BASIS, Draw, Key
from zeroblock.ops import add_, normal, uniform
from zeroblock.rule import RULES, Rule
from zeroblock.schedule import SCHEDULES
from zeroblock.subspace import SUBSPACES, Subspace


# A subspace: one random axis per tensor, redrawn each turn.  Its basis has a tensor of its own.
@dataclasses.dataclass(frozen=True)
class OneAxis(Basis):
    axis: Tensor  # (numel,) zero but for one element
    site: Site

    size = 1

    def coords(self, param: Tensor, key: Key, span: slice) -> Tensor:
        return normal(Draw(key, self.site.offset, self.site.distribution), (1,), device=param.device)

    def lift_(self, param: Tensor, delta: Tensor, span: slice, alpha: float, key: Key, decay: float) -> None:
        lifted = self.axis.to(param.device) * delta
        add_(param, lifted, alpha, Draw(key, self.site.offset), decay=decay, rounding=self.site.rounding)


@SUBSPACES.register
@dataclasses.dataclass(frozen=True)
class Axis(Subspace):
    def basis(self, param: Tensor, key: Key, site: Site) -> Basis:
        axis = torch.zeros(param.numel())
        if param.numel():
            axis[int(uniform(key.to(stream=BASIS), 1, site.offset)[0] * param.numel())] = 1.0
        return OneAxis(axis, site)


# An estimator: central differences that also look at θ itself, whose loss people read.
@ESTIMATORS.register
@dataclasses.dataclass(frozen=True)
class ThreePoint(FiniteDifference):
    def points(self, directions: Sequence[Direction]) -> list[Point]:
        sides = [Point(direction, sign * self.eps) for direction in directions for sign in (1, -1)]
        return [Point(directions[0], 0.0), *sides]

    def coeffs(self, losses: Tensor) -> Tensor:
        return ((losses[1::2] - losses[2::2]) / (2 * self.eps)).float()

    def loss(self, losses: Tensor) -> Tensor:
        return losses[0]


# A rule: Lion, the sign of an interpolated momentum.
@RULES.register
@dataclasses.dataclass(frozen=True)
class Lion(Rule):
    betas: tuple[float, float] = (0.9, 0.99)
    reset: bool = True
    state = ("m",)

    def delta(self, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        b1, b2 = self.betas
        sign = torch.lerp(g, state["m"], b1).sign_()
        state["m"].lerp_(g, 1 - b2)
        return sign


# A schedule: the block whose last coefficient was largest, and every block once before that.
@SCHEDULES.register
@dataclasses.dataclass(frozen=True)
class Loudest:
    learns = True

    def pick(self, turn: int, n: int, seed: int, scores: list[float]) -> int:
        return turn if turn < n else max(range(n), key=scores.__getitem__)

    def observe(self, scores: list[float], block: int, coeffs: tuple[float, ...]) -> None:
        scores[block] = sum(map(abs, coeffs))
