"""Many runs of subspace ZO-SGD on a quadratic at once: seeds × learning rates, for studies over both.

A two-sided difference is exact on a quadratic, so a step along v = Mu needs no losses:

    c = ⟨θ, Hv⟩        θ ← θ - α·c·v        L ← L - α·c² + ½·α²·c²·vᵀHv

All learning rates see the same starts and the same directions, which makes their comparison paired.  A run of a
thousand steps for 16 seeds and 10 learning rates at d = 1024 takes half a second; ``ZeroOrder`` would take minutes.
``tests/lab/test_lab_batched.py`` checks that steps equal ``ZeroOrder``'s, and that directions are distributed alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import ZeroBlockError
from .quadratic import Hessian

DIVERGED = 1e6
"""A run whose loss exceeds this multiple of the initial loss is stopped and counts as diverged."""


class Directions(Protocol):
    """A way to draw v = Mu, one row per seed."""

    def draw(self, seeds: int, step: int, generator: torch.Generator) -> Tensor:
        """Directions of one step, (seeds, d), fp64."""
        ...


def haar(rows: int, d: int, s: int, generator: torch.Generator) -> Tensor:
    """Uz for Haar U of d×s and z ~ N(0, I), (rows, d).

    Uz has the length of z and a direction uniform on the sphere, so U itself is not needed.
    """
    if s == 0:
        return torch.zeros(rows, d, dtype=torch.float64)
    x = torch.randn(rows, d, dtype=torch.float64, generator=generator)
    length = torch.randn(rows, s, dtype=torch.float64, generator=generator).norm(dim=1, keepdim=True)
    scaled: Tensor = x * (length / x.norm(dim=1, keepdim=True))
    return scaled


@dataclasses.dataclass(frozen=True)
class HaarDirections:
    """The low-rank projection: M = UUᵀ, redrawn at every step."""

    d: int
    s: int

    def draw(self, seeds: int, step: int, generator: torch.Generator) -> Tensor:
        return haar(seeds, self.d, self.s, generator)


@dataclasses.dataclass(frozen=True)
class AlignedDirections:
    """``chosen`` random eigenvectors of H, and a Haar subspace of s - chosen dimensions in their complement.

    Args:
        vectors: all eigenvectors of H in columns, (d, d), starting with a basis of the range of H.
        rank: the rank of H.
        s: dimensions of the subspace.
        chosen: number of them that are eigenvectors.
    """

    vectors: Tensor = dataclasses.field(repr=False)
    rank: int
    s: int
    chosen: int

    def draw(self, seeds: int, step: int, generator: torch.Generator) -> Tensor:
        d = self.vectors.shape[0]
        order = torch.rand(seeds, self.rank, generator=generator).argsort(dim=1)[:, : self.chosen]
        taken = torch.zeros(seeds, d, dtype=torch.float64).scatter_(1, order, 1.0)
        z = torch.randn(seeds, d, dtype=torch.float64, generator=generator)
        rest = z * (1 - taken)
        length = torch.zeros(seeds, 1, dtype=torch.float64)
        if self.s > self.chosen:
            length = torch.randn(seeds, self.s - self.chosen, dtype=torch.float64, generator=generator).norm(
                dim=1, keepdim=True
            )
        rest *= length / rest.norm(dim=1, keepdim=True)
        lifted: Tensor = (z * taken + rest) @ self.vectors.T
        return lifted


@dataclasses.dataclass(frozen=True)
class SparseDirections:
    """The sparse projection: each coordinate is kept with probability s/d, or exactly s of them are kept."""

    d: int
    s: int
    exact: bool = False

    def draw(self, seeds: int, step: int, generator: torch.Generator) -> Tensor:
        chance = torch.rand(seeds, self.d, generator=generator)
        limit = chance.kthvalue(self.s, dim=1, keepdim=True).values if self.exact else self.s / self.d
        kept = chance <= limit
        return torch.randn(seeds, self.d, dtype=torch.float64, generator=generator) * kept


@dataclasses.dataclass(frozen=True)
class BlockDirections:
    """The block-sparse projection: one block of s neighbouring coordinates per step.

    Args:
        d: dimension.
        s: coordinates per block; divides d.
        order: "uniform" (independent draws), "shuffled" (a fresh permutation per cycle), "ascending", or
            "weighted" (independent draws with probabilities ``weights``).
        weights: probabilities of the blocks, (d/s,), for "weighted".
        scales: factors of the direction, one per block: a factor f multiplies the block's learning rate by f².
    """

    d: int
    s: int
    order: str = "uniform"
    weights: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()
    _permutations: dict[int, Tensor] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.d % self.s:
            raise ZeroBlockError(f"blocks of {self.s} coordinates do not divide a dimension of {self.d}")
        if self.order not in ("uniform", "shuffled", "ascending", "weighted"):
            raise ZeroBlockError(f"unknown order {self.order!r}: choose uniform, shuffled, ascending or weighted")

    def pick(self, seeds: int, step: int, generator: torch.Generator) -> Tensor:
        """The block of each seed at a step, (seeds,)."""
        count = self.d // self.s
        if self.order == "ascending":
            return torch.full((seeds,), step % count)
        if self.order == "uniform":
            return torch.randint(count, (seeds,), generator=generator)
        if self.order == "weighted":
            probabilities = torch.tensor(self.weights, dtype=torch.float64)
            return torch.multinomial(probabilities, seeds, replacement=True, generator=generator)
        if step % count == 0:
            self._permutations[seeds] = torch.rand(seeds, count, generator=generator).argsort(dim=1)
        return self._permutations[seeds][:, step % count]

    def draw(self, seeds: int, step: int, generator: torch.Generator) -> Tensor:
        block = self.pick(seeds, step, generator)
        z = torch.randn(seeds, self.s, dtype=torch.float64, generator=generator)
        if self.scales:
            z *= torch.tensor(self.scales, dtype=torch.float64)[block].unsqueeze(1)
        v = torch.zeros(seeds, self.d // self.s, self.s, dtype=torch.float64)
        v[torch.arange(seeds), block] = z
        return v.view(seeds, self.d)


@dataclasses.dataclass(frozen=True)
class Runs:
    """Results of many runs.

    Args:
        lrs: learning rates, (rates,).
        steps: the steps at which losses were recorded, (points,).
        loss: loss relative to the start, (rates, seeds, points); infinite once a run has diverged, NaN
            after all runs have ended.
        reached: first step at which the relative loss was at or below the target, (rates, seeds); NaN if never.
        gradient: mean of ‖∇L‖² over all steps, (rates, seeds); NaN unless requested.
        gap: L(θ_0) - L(θ_T), (rates, seeds).
    """

    lrs: np.ndarray
    steps: np.ndarray
    loss: np.ndarray
    reached: np.ndarray
    gradient: np.ndarray
    gap: np.ndarray


def descend_all(
    hessian: Hessian,
    directions: Directions,
    *,
    lrs: Sequence[float],
    steps: int,
    seeds: int,
    seed: int = 0,
    target: float = 0.0,
    points: int = 50,
    gradients: bool = False,
    gradient_every: int = 1,
) -> Runs:
    """Run every learning rate from ``seeds`` random starts θ₀ ~ N(0, I).

    Args:
        hessian: the Hessian of the quadratic.
        directions: draws v.
        lrs: learning rates.
        steps: maximum number of steps; the runs end earlier when all have reached the target or diverged.
        seeds: runs per learning rate.
        seed: the seed of starts and directions.
        target: relative loss whose first passage is recorded; 0 for none.
        points: number of recorded losses.
        gradients: record the mean of ‖∇L(θ_t)‖², which costs a product with H for every run.
        gradient_every: take that mean over steps that are this far apart.
    """
    if steps < 1 or seeds < 1 or not lrs:
        raise ZeroBlockError(f"steps, seeds and learning rates must be at least one each, got {steps}, {seeds}, {lrs}")
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(seeds, hessian.dim, dtype=torch.float64, generator=generator)
    initial = (theta * (hessian @ theta.T.contiguous()).T).sum(1) / 2
    theta = theta.repeat(len(lrs), 1, 1)  # (rates, seeds, d)
    loss = initial.repeat(len(lrs), 1)
    alpha = torch.tensor(lrs, dtype=torch.float64).unsqueeze(1)
    alive = torch.ones_like(loss)
    reached = torch.full_like(loss, math.nan)
    recorded = np.unique(np.linspace(0, steps, points + 1).astype(int))
    losses: list[Tensor] = []
    squares, measured = torch.zeros_like(loss), 0
    for t in range(steps + 1):
        relative = loss / initial
        diverged = ~(relative < DIVERGED)
        alive[diverged] = 0
        if target:
            reached[torch.isnan(reached) & (relative <= target)] = t
        if t == recorded[len(losses)]:
            losses.append(torch.where(diverged, math.inf, relative))
        if t == steps or (target and bool((~torch.isnan(reached) | diverged).all())):
            break
        if gradients and t % gradient_every == 0:
            flat = theta.reshape(-1, hessian.dim).T.contiguous()
            squares += (hessian @ flat).square().sum(0).view_as(squares)
            measured += 1
        v = directions.draw(seeds, t, generator)
        image = (hessian @ v.T.contiguous()).T
        curvature = (v * image).sum(1)
        step_size = alpha * alive
        coeff = torch.einsum("rnd,nd->rn", theta, image)
        theta.addcmul_((step_size * coeff).unsqueeze(2), v.unsqueeze(0), value=-1)
        loss = loss - step_size * coeff**2 * (1 - step_size * curvature / 2)
    while len(losses) < len(recorded):
        losses.append(torch.full_like(loss, math.nan))
    mean = squares / measured if measured else torch.full_like(loss, math.nan)
    stacked = torch.stack(losses, dim=2)
    return Runs(np.asarray(lrs), recorded, stacked.numpy(), reached.numpy(), mean.numpy(), (initial - loss).numpy())


def mean_error(values: np.ndarray, axis: int = -1) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error along an axis."""
    count = values.shape[axis]
    error = values.std(axis=axis, ddof=1) / math.sqrt(count) if count > 1 else np.zeros_like(values.mean(axis=axis))
    return values.mean(axis=axis), error
