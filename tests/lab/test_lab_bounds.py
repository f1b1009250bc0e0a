"""The calculators: against explicit matrices, against runs, and their preconditions."""

from __future__ import annotations

import math

import pytest
import torch

from zeroblock.errors import ZeroBlockError
from zeroblock.lab import rate, stability
from zeroblock.lab.alignment import ENSEMBLES, expected
from zeroblock.lab.bounds import Alignments, Rate, Stability, Tail, intdim, rho, srank
from zeroblock.lab.quadratic import Hessian, hessian, heterogeneous
from zeroblock.lab.tails import NAMES, compare


def test_ranks_and_dimensions_of_known_matrices() -> None:
    assert srank(torch.eye(5)) == pytest.approx(5)
    assert srank(torch.diag(torch.tensor([2.0, 1.0, 0.0]))) == pytest.approx(1.25)
    assert intdim(torch.diag(torch.tensor([2.0, 1.0, 0.0]))) == pytest.approx(1.5)
    projection = torch.diag(torch.tensor([1.0, 0.0, 1.0]))
    assert rho(projection, torch.diag(torch.tensor([2.0, 7.0, 1.0]))) == pytest.approx(3 / 7)
    assert Alignments.of([1.0, 3.0]) == Alignments(2.0, 3.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: intdim(torch.tensor([[1.0, 2.0], [0.0, 1.0]])), "symmetric"),
        (lambda: intdim(-torch.eye(2)), "semi-definite"),
        (lambda: srank(torch.zeros(2, 2)), "positive"),
        (lambda: rho(torch.eye(3), torch.eye(2)), "rows"),
        (lambda: Alignments.of([]), "at least one"),
        (lambda: Alignments.of([-1.0]), "not negative"),
        (lambda: Rate(0.0, 4, 2, 2, Alignments(1, 1)), "L must be positive"),
        (lambda: Rate(1.0, 4, 8, 2, Alignments(1, 1)), "cannot exceed"),
        (lambda: Rate(1.0, 4, 2, 2, Alignments(2, 1)), "exceeds"),
        (lambda: Stability(1.0, 1.0, 4, 1.0, 10, -1.0), "C must be positive"),
        (lambda: Stability(1.0, 1.0, 4, 1.0, 10, 1.0).bound(10, 1.0), "eps ≤"),
        (lambda: Tail(hessian(8, 4), 4).sparse(0.0), "excess"),
        (lambda: Tail(hessian(8, 4), 9), "s must be"),
    ],
)  # fmt: skip
def test_preconditions_are_checked(call, words: str) -> None:
    with pytest.raises(ZeroBlockError, match=words):
        call()


def test_theorem_3_3_refuses_what_it_does_not_cover() -> None:
    r = Rate(10.0, 256, 64, 35.2, Alignments(8.8, 9.5))
    assert r.max_step == pytest.approx(1 / (36 * 10 * 9.5 + 336 * 10 * 64 * math.exp(-32)))
    eps = r.smoothing(100)
    assert eps == pytest.approx(1 / (10 * math.sqrt(8.8 * 256 * 100)))
    value = r.published(gap=5.0, lr=r.max_step, steps=100, eps=eps, noise=2.0, batch=4)
    by_hand = (
        3 * 35.2**2 / (2 * 8.8 * 100) + 8 * 5 / (r.max_step * 100) + 8 * (256 + 64) / (8.8 * 256 * 100)
        + 13 * 64**2 / (9 * 256 * 100) + 37 * 64**2 / (42 * 8.8 * 256 * 100) + 2 / 4
    )  # fmt: skip
    assert value == pytest.approx(by_hand)
    with pytest.raises(ZeroBlockError, match="lr ≤"):
        r.published(gap=5.0, lr=2 * r.max_step, steps=100, eps=eps)
    with pytest.raises(ZeroBlockError, match="eps ≤"):
        r.published(gap=5.0, lr=r.max_step, steps=100, eps=2 * eps)
    with pytest.raises(ZeroBlockError, match="gap"):
        r.corrected(gap=-1.0, lr=r.max_step, steps=100)


@pytest.fixture(scope="module")
def runs():
    return {s: rate.against_bound(rate.Setting(128, 32, s, 400), seed=0) for s in (64, 4)}


def test_the_corrected_rate_bounds_runs(runs) -> None:
    """Every T past 20: before, one draw of Δ is noise and the bound is on the expectation."""
    for frame in runs.values():
        later = frame[frame["T"] >= 100]
        assert bool((later.measured <= later.corrected).all())
        assert bool((later.corrected <= 10 * later.measured).all())  # and is not vacuous


def test_the_published_rate_fails_in_a_small_subspace(runs) -> None:
    assert bool((runs[64].measured <= runs[64].published).all())
    later = runs[4][runs[4]["T"] >= 100]
    assert bool((later.measured > later.published).all())


def test_stability_bound_is_the_papers_where_its_minimum_lies_inside() -> None:
    t = Stability(0.5, 0.25, 16, 1.0, 1000, 1.0)
    q, g, n, length = 2.0, 0.25, 1000, 0.5
    assert t.q == q
    steps = 500
    inner = g * (math.sqrt(3) + 4 * g) / length
    paper = (q + 1) / (n * q ** (q / (1 + q))) * inner ** (1 / (1 + q)) * steps ** (q / (1 + q)) - inner / n
    assert t.bound(steps, t.max_smoothing) == pytest.approx(paper)
    assert t.bound(4 * steps, t.max_smoothing) > paper


def test_neighbouring_runs_stay_within_the_stability_bound() -> None:
    setting = stability.Setting(16, 4, 20, 60)
    import pandas

    frame = stability.summarise(pandas.concat([stability.pair(setting, seed, 5) for seed in range(3)]), setting)
    assert bool((frame.measured <= frame.bound).all())
    assert float(frame.measured.iloc[-1]) > 0  # the runs do part: the example is drawn
    assert frame.bound.is_monotonic_increasing


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rank", "s"), [(4, 16), (16, 32)])
def test_tail_bounds_are_never_violated(name: str, rank: int, s: int) -> None:
    frame = compare(heterogeneous(256, rank, 16, seed=1), s, name, 3000, seed=4)
    assert bool((frame.empirical <= frame.bound + 4 * frame.error).all())
    if name == "block-sparse":  # exact, so equality up to sampling
        assert bool(((frame.empirical - frame.bound).abs() <= 4 * frame.error + 1e-12).all())


def test_the_low_rank_tail_does_not_depend_on_the_scale_of_the_hessian() -> None:
    h = hessian(64, 16)
    small = Hessian(h.blocks / 1000, h.spectra / 1000, h.vectors)
    assert Tail(h, 8).low_rank(0.2) == pytest.approx(Tail(small, 8).low_rank(0.2))
    assert expected(h, 8) == pytest.approx(expected(small, 8))
    share = float((ENSEMBLES["low-rank"].sample(small, 8, 5000) >= Tail(small, 8).threshold(0.1)).double().mean())
    assert share > 0.1 > Tail(small, 8).low_rank(0.1, "published")
    assert share <= Tail(small, 8).low_rank(0.1)
