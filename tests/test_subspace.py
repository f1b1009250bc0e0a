"""Bases: linear maps that are applied in several forms, all the same map."""

from __future__ import annotations

import pytest
import torch

from zeroblock.basis import Factored, Site
from zeroblock.errors import ZeroBlockError
from zeroblock.noise import Distribution, Key, Rounding
from zeroblock.size import smallest
from zeroblock.subspace import Bernoulli, Full, LowRank, Sparse

SUBSPACES = [Full(), LowRank(2), LowRank(99), Sparse(0.5), Bernoulli(0.3)]
SHAPES = [(5, 7), (9,), (), (1, 4), (3, 2, 2), (6, 1)]


@pytest.mark.parametrize("subspace", SUBSPACES, ids=repr)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("distribution", Distribution)
def test_every_way_to_apply_p_is_the_same_map(subspace, shape: tuple[int, ...], distribution: Distribution) -> None:
    """perturbed, add_ and coords + lift_ all add ε·Pz."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    basis = subspace.basis(x, Key(1, 20), Site(1000, distribution, initial=subspace.initial(x)))
    key, eps = Key(1, 23, 1), 0.25
    copy = basis.perturbed(x, key, eps)
    added = x.clone()
    basis.add_(added, key, [eps], 1.0)
    lifted = x.clone()
    for span in basis.spans():
        basis.lift_(lifted, basis.coords(x, key, span), span, eps, key, 1.0)
    torch.testing.assert_close(copy, added, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lifted, added, rtol=1e-5, atol=1e-6)
    assert copy.shape == x.shape
    assert not torch.equal(copy, x)
    moved = copy - x
    if isinstance(subspace, LowRank) and len(shape) > 1:
        assert torch.linalg.matrix_rank(moved.reshape(shape[0], -1), tol=1e-5) <= subspace.rank
    if isinstance(subspace, Sparse):
        assert torch.equal(moved != 0, x.abs() <= subspace.initial(x))


@pytest.mark.parametrize("subspace", SUBSPACES, ids=repr)
def test_strided_weights(subspace) -> None:
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).t()
    dense = x.contiguous()
    results = []
    for w in (x.clone(memory_format=torch.preserve_format), dense.clone()):
        basis = subspace.basis(w, Key(1, 2), Site(3, rounding=Rounding.NEAREST, initial=subspace.initial(w)))
        basis.add_(w, Key(1, 3), [0.1, 0.2], 0.9)
        for span in basis.spans():
            basis.lift_(w, basis.coords(w, Key(1, 4), span), span, 0.1, Key(1, 4), 1.0)
        results.append(w)
    assert not results[0].is_contiguous()
    assert torch.equal(*results)


@pytest.mark.parametrize("subspace", [Full(), LowRank(2)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_both_sides_are_rounded_as_mirror_images(subspace, dtype: torch.dtype) -> None:
    """A weight that chance rounds away from θ on one side is rounded away on the other: no noise in c."""
    x = torch.full((64, 96), 1.5, dtype=dtype)
    basis = subspace.basis(x, Key(1, 20), Site(0))
    plus, minus = (basis.perturbed(x, Key(1, 23), eps) for eps in (1e-4, -1e-4))
    assert 0.005 < (plus != x).float().mean() < 0.5
    assert torch.equal(plus.float() - x.float(), x.float() - minus.float())


def test_low_rank_holds_v_for_a_turn_and_draws_u_each_step() -> None:
    x = torch.zeros(6, 8)
    first = LowRank(1).basis(x, Key(0, 0), Site(0))
    later = LowRank(1).basis(x, Key(0, 50), Site(0))
    a, b = (first.perturbed(x, Key(0, s), 1.0) for s in (0, 1))
    c = later.perturbed(x, Key(0, 50), 1.0)
    assert torch.linalg.matrix_rank(torch.cat([a, b])) == 1  # same V
    assert torch.linalg.matrix_rank(torch.cat([a, c])) == 2
    assert isinstance(first, Factored)
    assert first.size == 6
    wide = LowRank(99).basis(x, Key(0, 0), Site(0))
    assert wide.size == 6 * 6  # no more than the smaller side


def test_bernoulli_keeps_its_fraction_and_holds_it_for_a_turn() -> None:
    x = torch.zeros(100_000)
    basis = Bernoulli(0.3).basis(x, Key(0, 0), Site(7))
    masks = [basis.perturbed(x, Key(0, s), 1.0) != 0 for s in (0, 1)]
    assert torch.equal(*masks)
    assert float(masks[0].float().mean()) == pytest.approx(0.3, abs=0.01)
    other = Bernoulli(0.3).basis(x, Key(0, 1), Site(7))
    assert not torch.equal(masks[0], other.perturbed(x, Key(0, 1), 1.0) != 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("n", [1, 7, 1000])
def test_the_kth_smallest_magnitude_is_exact(dtype: torch.dtype, n: int) -> None:
    x = (torch.randn(n, generator=torch.Generator().manual_seed(n)) * 1e-3).to(dtype)
    x[: n // 3] = x[0]  # ties
    order = x.abs().double().sort().values
    for k in {1, max(1, n // 2), n}:
        assert smallest(x, k) == float(order[k - 1])


def test_sparse_keeps_the_smallest() -> None:
    x = torch.tensor([0.5, -0.1, 0.3, -0.9])
    subspace = Sparse(0.5)
    threshold = subspace.initial(x)
    assert threshold == pytest.approx(0.3)
    basis = subspace.basis(x, Key(0, 0), Site(0, initial=threshold))
    moved = basis.perturbed(x, Key(0, 0), 1.0) != x
    assert moved.tolist() == [False, True, True, False]


def test_bad_values_are_refused() -> None:
    for build, message in (
        (lambda: LowRank(0), "rank must be at least 1"),
        (lambda: Sparse(0), r"Sparse: keep must be in \(0, 1\]"),
        (lambda: Bernoulli(1.5), r"Bernoulli: keep must be in \(0, 1\]"),
    ):
        with pytest.raises(ZeroBlockError, match=message):
            build()
