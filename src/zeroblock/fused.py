"""A replay on the GPU without launches per step: every weight takes all its steps at once.

With SGD a weight's step depends on nothing but that weight, so the steps of a
block are one launch (or three per matrix in low-rank subspaces) instead of one per step
and tensor, whose overhead on OPT-1.3B is ten times the arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from .direction import Member
from .noise import Draw, Key
from .ops.replay import Matrix, Piece, Pieces, Steps, advance_
from .optimizer import ZeroOrder
from .record import Record

Progress = Callable[[float], None]
"""Called with the number of steps or the fraction that is done."""

MAX_WORK = 10**11
"""Weights times folds per launch: a fifth of a second on an H200."""
MAX_COORDINATES = 1 << 24
"""Coordinates of a matrix that are drawn before a launch, in fp32: 64 MiB."""
MAX_FOLDS = 1 << 15
"""Folds per launch: fewer than the rows of programs that CUDA allows."""


def serves(optimizer: ZeroOrder) -> bool:
    """Whether an optimizer's steps can be taken together."""
    weights, turn = optimizer.weights, optimizer.turn.number
    return (
        optimizer.rule.adds_up
        and weights.restore == "copy"
        and not weights.sharded
        and all(
            (p.is_cuda or weights.shelf.place(p).type == "cuda") and p.is_contiguous() for p in weights.params.values()
        )
        and all(m.basis.replays_together for b in range(len(weights.blocks)) for m in weights.members(b, turn))
    )


def advance(optimizer: ZeroOrder, visits: dict[int, list[Record]], report: Progress) -> None:
    """Take steps whose coefficients are finite; the optimizer's own turn does not change.

    Args:
        optimizer: an optimizer at the first of these steps.
        visits: the records of each block, in whole folds, with the coefficients that the steps use.
        report: called with the number of steps done.
    """
    steps_in_all = sum(map(len, visits.values()))
    total = sum(optimizer.weights.numel(block) * len(records) for block, records in visits.items())
    done = 0
    for group, steps in _work(optimizer, visits):
        folds = min(MAX_WORK // group.numel, MAX_COORDINATES // group.coordinates, MAX_FOLDS)
        rows = group.fold * max(1, folds)
        for a in range(0, len(steps), rows):
            part = steps[a : a + rows]
            with torch.cuda.device_of(group.flat):
                advance_(group, part, optimizer.rounding)
                if group.flat.is_cuda:
                    torch.cuda.synchronize()  # so that the reported steps are done
            done += group.numel * len(part)
            report(steps_in_all * done / total)


def _work(optimizer: ZeroOrder, visits: dict[int, list[Record]]) -> Iterator[tuple[Pieces | Matrix, Steps]]:
    """The tensors and steps of each launch, block by block, and layer by layer if weights are streamed."""
    weights = optimizer.weights
    for block, records in visits.items():
        for members in weights.shelf.visits(weights.members(block, optimizer.turn.number), folds=True):
            yield from _groups(optimizer, members, records)


def _groups(
    optimizer: ZeroOrder, members: Sequence[Member], records: list[Record]
) -> Iterator[tuple[Pieces | Matrix, Steps]]:
    """The tensors that one launch can serve, with their steps."""
    step = np.array([record.step for record in records])
    lr = np.array([record.lr for record in records])
    coeffs = np.array([record.coeffs for record in records])
    alphas = -lr[:, None] * (coeffs / coeffs.shape[1])
    turn = step // optimizer.interval * optimizer.interval
    weight_decay = optimizer.param_groups[0]["weight_decay"]

    def steps(decayed: bool, scale: float) -> Steps:
        lifted = alphas if scale == 1 else (alphas.astype(np.float32) * np.float32(scale)).astype(np.float64)
        return Steps(step, turn, lifted, 1 - lr * weight_decay if decayed else np.ones_like(lr))

    groups: dict[tuple[bool, float, torch.dtype, torch.device, type], list[Piece]] = defaultdict(list)
    for name, param, basis in members:
        if not param.numel():
            continue
        decayed = bool(weight_decay) and optimizer.decays(name, param)
        flat = param.detach().view(-1)
        draw = basis.elementwise(Key(optimizer.seed, 0))
        if draw is None:
            assert basis.factor_shape is not None
            draw = Draw(Key(optimizer.seed, 0), optimizer.offsets[name], optimizer.distribution)
            yield Matrix(flat, draw, *basis.factor_shape, optimizer.fold), steps(decayed, basis.scale)
            continue
        groups[decayed, basis.scale, param.dtype, param.device, type(draw.mask)].append(Piece(flat, draw))
    for (decayed, scale, *_), pieces in groups.items():
        yield Pieces(pieces), steps(decayed, scale)
