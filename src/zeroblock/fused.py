"""A replay on the GPU without a step's launches: every weight takes all its steps at once.

With SGD a weight's step depends on nothing but that weight, so the steps of a
block are one launch (or three a matrix in low-rank subspaces), and not one a step
and tensor, whose overhead on OPT-1.3B is ten times the arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from .estimator import clipped
from .noise import Draw, Key
from .ops.replay import Matrix, Piece, Pieces, Steps, advance_
from .record import Record
from .rerun import Progress, another_run
from .rule import SGD
from .subspace import Bernoulli, Elementwise, Factored, Full, LowRank, Sparse

if TYPE_CHECKING:
    from .optimizer import ZeroOrder

WORK = 10**11
"""Weights times folds of a launch: a fifth of a second on an H200."""
ROOM = 1 << 24
"""Coordinates of a matrix that are drawn before a launch, in fp32: 64 MiB."""
MOST = 1 << 15
"""Folds of a launch: fewer than CUDA allows of rows of programs."""


def serves(optimizer: ZeroOrder) -> bool:
    """Whether an optimizer's steps can be taken together."""
    return (
        isinstance(optimizer.rule, SGD)
        and isinstance(optimizer.subspace, (Full, LowRank, Sparse, Bernoulli))
        and not getattr(optimizer.subspace, "as_published", False)
        and optimizer.restore == "copy"
        and all(p.is_cuda and p.is_contiguous() for p in optimizer.params.values())
    )


def advance(optimizer: ZeroOrder, records: list[Record], report: Progress) -> None:
    """Take steps whose coefficients are finite, of one number of probes.

    Args:
        optimizer: standing at the first of them.
        records: consecutive, whole folds.
        report: called with the number of steps done.
    """
    visits, after = _plan(optimizer, records)
    sizes = {b: sum(optimizer.params[n].numel() for n in optimizer.blocks[b].params) for b in visits}
    total = sum(size * len(visits[b]) for b, size in sizes.items())
    done = 0
    for block, visited in visits.items():
        for group, steps in _groups(optimizer, block, visited):
            rows = group.fold * max(1, min(WORK // group.numel, ROOM // group.coordinates, MOST))
            for a in range(0, len(steps), rows):
                part = steps[a : a + rows]
                with torch.cuda.device_of(group.flat):
                    advance_(group, part, optimizer.rounding)
                    if group.flat.is_cuda:
                        torch.cuda.synchronize()  # so that what is reported is done
                done += group.numel * len(part)
                report(len(records) * done / total)
    optimizer.load_state_dict(after)
    optimizer.record = records[-1]


def _plan(optimizer: ZeroOrder, records: list[Record]) -> tuple[dict[int, list[Record]], dict]:
    """The records of each block, and the optimizer's state after them."""
    state = optimizer.state_dict()
    scores, block, n = list(optimizer.scores), optimizer.block, len(optimizer.blocks)
    visits: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        if record.block != block:
            raise another_run(record, block)
        visits[block].append(record)
        optimizer.schedule.observe(scores, block, clipped(record.coeffs, optimizer.clip))
        turn, rest = divmod(record.step + 1, optimizer.interval)
        if not rest:
            block = optimizer.schedule.pick(turn, n, optimizer.seed, scores)
    return visits, {**state, "steps": records[-1].step + 1, "block": block, "scores": scores, "run_of_bad": 0}


def _groups(optimizer: ZeroOrder, block: int, records: list[Record]) -> Iterator[tuple[Pieces | Matrix, Steps]]:
    """The tensors of a block that one launch can serve, with their steps."""
    step = np.array([record.step for record in records])
    lr = np.array([record.lr for record in records])
    coeffs = np.array([clipped(record.coeffs, optimizer.clip) for record in records])
    alphas = -lr[:, None] * (coeffs / coeffs.shape[1])
    turn = step // optimizer.interval * optimizer.interval
    weight_decay = optimizer.param_groups[0]["weight_decay"]

    def steps(decayed: bool) -> Steps:
        return Steps(step, turn, alphas, 1 - lr * weight_decay if decayed else np.ones_like(lr))

    groups: dict[tuple[bool, torch.dtype, torch.device, type], list[Piece]] = defaultdict(list)
    for name, param, basis in optimizer.members_of(block):
        if not param.numel():
            continue
        decayed = bool(weight_decay) and optimizer.decays(name, param)
        flat = param.detach().view(-1)
        draw = Draw(Key(optimizer.seed, 0), optimizer.offsets[name], optimizer.distribution)
        if isinstance(basis, Factored):
            yield Matrix(flat, draw, basis.shape[1], basis.rank, optimizer.fold), steps(decayed)
            continue
        assert isinstance(basis, Elementwise)
        groups[decayed, param.dtype, param.device, type(basis.mask)].append(Piece(flat, draw.to(mask=basis.mask)))
    for (decayed, *_), pieces in groups.items():
        yield Pieces(pieces), steps(decayed)
