"""The tensors of a replay, grouped as launches serve them, and their steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...noise import Draw


@dataclasses.dataclass(frozen=True)
class Steps:
    """What T steps do to a tensor.

    Args:
        step: numbers of the steps, (T,) int64.
        turn: first step of the turn that each is in, (T,) int64.
        alphas: (T, probes) fp64.
        decay: (T,) fp64.
    """

    step: np.ndarray
    turn: np.ndarray
    alphas: np.ndarray
    decay: np.ndarray

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, rows: slice | np.ndarray) -> Steps:
        return Steps(self.step[rows], self.turn[rows], self.alphas[rows], self.decay[rows])

    @property
    def moving(self) -> Steps:
        """The steps without those that change not even the sign of a zero."""
        return self[(self.decay != 1.0) | (self.alphas != 0.0).any(axis=1)]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A contiguous tensor and the noise that its steps add.

    Args:
        flat: its weights.
        draw: of each step, which replaces the key's step by its own, and the mask's by the first of its turn.
    """

    flat: Tensor
    draw: Draw


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Tensors that one launch serves: they share device, dtype, seed, distribution and kind of mask."""

    pieces: Sequence[Piece]
    fold = coordinates = 1

    @property
    def flat(self) -> Tensor:
        """The weights of the first piece."""
        return self.pieces[0].flat

    @property
    def numel(self) -> int:
        """The number of weights of all pieces."""
        return sum(piece.flat.numel() for piece in self.pieces)


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A contiguous matrix that moves by z Vᵀ.

    Args:
        flat: its weights, m·n of them.
        draw: of z and V, whose steps are replaced by each step's number and the first step of its turn; no mask.
        width: n.
        rank: columns of z and V.
        fold: steps whose z are added up before they move the weights.
    """

    flat: Tensor
    draw: Draw
    width: int
    rank: int
    fold: int = 1

    @property
    def numel(self) -> int:
        """m·n."""
        return self.flat.numel()

    @property
    def coordinates(self) -> int:
        """How many numbers are drawn before a launch for each of its folds."""
        return max(self.numel // self.width, self.width) * self.rank
