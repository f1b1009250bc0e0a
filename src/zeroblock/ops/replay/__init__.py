"""Many steps at once: a weight takes all the steps of a replay in one launch.

    x ← round(decay[t]·x + P Σₖ alphas[t, k]·u_k)      for every step t

``reference`` takes one step after another with the references of ``noise`` and ``outer``; ``triton`` reads and
writes every weight once.  There is no CPU version: a replay on the CPU takes its steps one by one.
"""

from __future__ import annotations

from ...noise import Rounding
from ..shared.dispatch import backend
from .group import Matrix, Piece, Pieces, Steps

__all__ = ["Matrix", "Piece", "Pieces", "Steps", "advance_"]


def advance_(group: Pieces | Matrix, steps: Steps, rounding: Rounding) -> None:
    """Take steps, whole folds of them, on the tensors of a group on a GPU."""
    steps = steps.moving if group.fold == 1 else steps
    if not len(steps):
        return
    module = backend("replay", "cuda")
    if isinstance(group, Matrix):
        module.advance_matrix_(group, steps, rounding)
    else:
        module.advance_pieces_(group, steps, rounding)
