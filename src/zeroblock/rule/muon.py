"""Orthogonalised estimates: a rule that sees matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from ..direction import Member
from ..errors import ZeroBlockError
from ..state import State
from .base import RULES, Move, Rule

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Muon's coefficients a, b, c of the iteration X ← aX + (bA + cA²)X with A = XXᵀ."""


@RULES.register
@dataclasses.dataclass(frozen=True)
class Muon(Rule):
    """δ ≈ UVᵀ of the singular vectors of g = USVᵀ, by Newton-Schulz iterations; δ = vectors·g if g is not a matrix.

    g is the estimate of one tensor in coordinates: r×n or m×r in a low-rank subspace, and m×n in the full space,
    where it is materialised whole.  An iteration on a×b (a ≤ b) takes 4·a²·b + 2·a³ operations and about 2·a·b numbers,
    in fp64, so that the result in fp32 does not depend on the library that multiplies.

    Args:
        iterations: the number of Newton-Schulz iterations; five bring singular values between 0.7 and 1.2.
        vectors: factor on the steps of vectors, which are plain estimates; ZO-Muon's code uses lr 1e-7 for them
            and 1e-2 for matrices.
    """

    iterations: int = 5
    vectors: float = 1e-5
    divisible = False
    unscaled = True

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ZeroBlockError(f"Muon: iterations must be at least 1, got {self.iterations}")

    def delta(self, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        return g.mul_(self.vectors)

    def update_(self, members: Sequence[Member], state: State, move: Move) -> None:
        for member in members:
            param, basis = member.local, member.basis
            shape = basis.matrix(param)
            if shape is None:
                self._update_(member, state.of(member), move)
                continue
            g = torch.cat([basis.combined(param, move.key, move.shares, span) for span in basis.spans()])
            delta, decay = orthogonalised(g.view(shape), self.iterations).view(-1), move.decay(member)
            for span in basis.spans():
                basis.lift_(param, delta[span], span, -float(move.lr), move.key, decay)


def orthogonalised(matrix: Tensor, iterations: int) -> Tensor:
    """A matrix with the same singular vectors and singular values near 1, by Newton-Schulz; (a, b) fp32."""
    a, b, c = QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = (matrix.T if tall else matrix).double()
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if tall else x).float().contiguous()
