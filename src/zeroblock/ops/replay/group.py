"""The tensors of a replay, grouped by launch, and their steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...noise import Draw


@dataclasses.dataclass(frozen=True)
class Steps:
    """The changes that T steps make to a tensor.

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
        """The steps, except those that do not even change the sign of a zero."""
        return self[(self.decay != 1.0) | (self.alphas != 0.0).any(axis=1)]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A contiguous tensor and the noise that its steps add.

    Args:
        flat: its weights.
        draw: its noise; every step puts its own number into the key, and the first step of its turn into the mask.
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
        draw: the draw of z and V; a step puts its number into z's key and the first step of its turn into V's; no mask.
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
        """Numbers that are drawn before a launch for each of its folds."""
        return max(self.numel // self.width, self.width) * self.rank
