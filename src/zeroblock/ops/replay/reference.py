"""The slow, obvious version: one step after another, with the references of ``noise`` and ``outer``."""

from __future__ import annotations

import torch

from ...noise import BASIS, Draw, RandomMask, Rounding
from ..noise.reference import add_noise_
from ..outer.reference import add_outer_
from .group import Matrix, Pieces, Steps


def advance_pieces_(group: Pieces, steps: Steps, rounding: Rounding) -> None:
    """Take the steps on every piece."""
    for piece in group.pieces:
        for t in range(len(steps)):
            draw = _of_step(piece.draw, int(steps.step[t]), int(steps.turn[t]))
            alphas = tuple(steps.alphas[t].tolist())
            add_noise_(piece.flat, piece.flat, draw, alphas, decay=float(steps.decay[t]), rounding=rounding)


def advance_matrix_(matrix: Matrix, steps: Steps, rounding: Rounding) -> None:
    """Take the steps, whole folds of them."""
    height = matrix.numel // matrix.width
    for a in range(0, len(steps), matrix.fold):
        z = torch.zeros(height * matrix.rank)
        for t in range(a, a + matrix.fold):
            draw = _of_step(matrix.draw, int(steps.step[t]), int(steps.turn[t]))
            add_noise_(z, z, draw, tuple(steps.alphas[t].tolist()), decay=1.0, rounding=Rounding.NEAREST)
        basis = draw.to(key=draw.key.to(step=int(steps.turn[t]), stream=BASIS))
        v = torch.zeros(matrix.width * matrix.rank)
        add_noise_(v, v, basis, (1.0,), decay=1.0, rounding=Rounding.NEAREST)
        z, v = z.view(height, matrix.rank), v.view(matrix.width, matrix.rank)
        add_outer_(matrix.flat, z, v, 1.0, draw, decay=float(steps.decay[t]), rounding=rounding)


def _of_step(draw: Draw, step: int, turn: int) -> Draw:
    """The draw of a step: its own number addresses the noise, the first step of its turn the mask."""
    mask = draw.mask
    if isinstance(mask, RandomMask):
        mask = RandomMask(mask.key.to(step=turn), mask.limit)
    return draw.to(key=draw.key.to(step=step), mask=mask)
