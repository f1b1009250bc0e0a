"""All steps of a replay at once are the steps one after another, to the bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from ops_toy import DTYPES, GPU, MASKS, weights

from toy import bits
from zeroblock.noise import Distribution, Draw, Key, RandomMask, Rounding
from zeroblock.ops import replay
from zeroblock.ops.replay import reference
from zeroblock.ops.replay.group import Matrix, Piece, Pieces, Steps

pytest.importorskip("zeroblock.ops.replay.triton")

KEY = Key(5, 0)


def steps(count: int, probes: int) -> Steps:
    """Steps 3, 4, … in turns of two, each with a decay and coefficients of its own."""
    rng, step = np.random.default_rng(0), np.arange(3, 3 + count)
    return Steps(step, step // 2 * 2, 0.01 * rng.standard_normal((count, probes)), 1 - 0.1 * rng.random(count))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounding", Rounding)
def test_pieces(dtype: torch.dtype, rounding: Rounding) -> None:
    for mask, (probes, distribution) in itertools.product(MASKS, enumerate(Distribution, 1)):
        results = []
        for where, advance_ in (("cpu", reference.advance_pieces_), (GPU, replay.advance_)):
            draw = Draw(KEY, 13, distribution, mask)
            tensors = [weights(n, dtype).to(where) for n in (50, 1030)]
            advance_(Pieces([Piece(tensors[0], draw), Piece(tensors[1], draw.at(50))]), steps(3, probes), rounding)
            results.append([bits(x) for x in tensors])
        for expected, got in zip(*results, strict=True):
            assert torch.equal(expected, got), (mask, distribution, probes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rank", "fold"), [(1, 1), (3, 1), (2, 2)])
def test_a_matrix(dtype: torch.dtype, rank: int, fold: int) -> None:
    for probes, distribution in enumerate(Distribution, 1):
        results = []
        for where, advance_ in (("cpu", reference.advance_matrix_), (GPU, replay.advance_)):
            x = weights(50 * 41, dtype).to(where)
            matrix = Matrix(x, Draw(KEY, 2**33 + 7, distribution), 41, rank, fold)
            advance_(matrix, steps(4, probes), Rounding.STOCHASTIC)
            results.append(bits(x))
        assert torch.equal(*results), (distribution, probes)
        assert not torch.equal(results[0], bits(weights(50 * 41, dtype)))


def test_a_mask_is_that_of_each_turn() -> None:
    """Over many turns every weight moves; the mask of one turn would leave half of them alone."""
    x = torch.zeros(64, device=GPU)
    piece = Piece(x, Draw(KEY, mask=next(mask for mask in MASKS if isinstance(mask, RandomMask))))
    replay.advance_(Pieces([piece]), steps(40, 1), Rounding.NEAREST)
    assert (x != 0).all()


def test_steps_that_move_nothing_change_not_even_signed_zeros() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -1.0], device=GPU)
    before = bits(x).clone()
    still = Steps(np.arange(3), np.arange(3), np.zeros((3, 1)), np.ones(3))
    replay.advance_(Pieces([Piece(x, Draw(KEY))]), still, Rounding.NEAREST)
    replay.advance_(Matrix(x, Draw(KEY), 2, 1), still, Rounding.NEAREST)
    assert torch.equal(bits(x), before)
