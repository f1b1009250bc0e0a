"""The calculators: against explicit matrices, against runs, and their preconditions."""

from __future__ import annotations

import math

import pytest
import torch

import zeroblock
from zeroblock.errors import ZeroBlockError
from zeroblock.lab import rate, stability
from zeroblock.lab.alignment import ENSEMBLES, expected
from zeroblock.lab.bounding import stability_checks
from zeroblock.lab.bounds import Alignments, Rate, Stability, Tail, intdim, rho, srank
from zeroblock.lab.projection import Haar
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
    return {s: rate.against_bound(rate.Setting(128, 32, s, 400), seeds=16) for s in (64, 4)}


def test_the_corrected_rate_bounds_runs(runs) -> None:
    for frame in runs.values():
        later = frame[frame["T"] >= 100]
        assert bool((later.measured - 4 * later.measured_error <= later.corrected).all())
        assert bool((later.corrected <= 10 * later.measured).all())  # and is not vacuous


def test_the_published_rate_fails_in_a_small_subspace(runs) -> None:
    assert bool((runs[64].ratio < 1).all())
    last = runs[4].iloc[-1]
    assert last.ratio - 4 * last.ratio_error > 1
    assert last.ratio == pytest.approx(128 / (8 * 4), rel=0.1)


def test_losses_of_bounded_gradient_violate_the_published_rate_by_d_over_8s() -> None:
    frame = rate.counterexamples(((64, 8), (512, 8)), steps=600, seeds=60)
    for row in frame[frame.loss != "fixed M"].itertuples():
        assert abs(row.ratio - row.d_over_8s) < 4.5 * row.ratio_error + 0.02 * row.d_over_8s
    assert float(frame[frame.loss == "fixed M"].ratio.min()) > 1e4


def test_corrected_bounds_hold_on_random_quadratics_and_in_cycles() -> None:
    frame = rate.corrected_on_random(4, steps=96, seeds=24)
    assert len(frame) == 24
    assert float(frame.z.max()) < 4.5
    assert bool((frame.groupby("ensemble").ratio.max() > 0.05).all())  # none is vacuous


def test_the_bound_of_cycles_rests_on_the_norm_of_a_triangle() -> None:
    """The strictly lower block triangle of 0 ⪯ H ⪯ L has norm at most ⌈log₂N⌉·L/2, whatever the order of the blocks."""
    generator = torch.Generator().manual_seed(0)
    for count in (2, 3, 8, 16):
        for _ in range(20):
            q = torch.linalg.qr(torch.randn(2 * count, 2 * count, dtype=torch.float64, generator=generator)).Q
            h = q @ torch.diag(torch.rand(2 * count, dtype=torch.float64, generator=generator).round()) @ q.T
            mask = torch.ones(count, count).tril(-1).repeat_interleave(2, 0).repeat_interleave(2, 1)
            assert float(torch.linalg.matrix_norm(h * mask, 2)) <= math.ceil(math.log2(count)) / 2 + 1e-9
    r = Rate(1.0, 64, 16, 8.0, Alignments(2.0, 4.0))
    spread = (1 / 6) ** 2 * 18  # κ = 1, αL = 1/6
    assert r.cyclic(gap=3.0, lr=1 / 6, steps=40) == pytest.approx(4 * 4 * (1 + spread) * 3 / (1 / 6 * 40))
    with pytest.raises(ZeroBlockError, match="whole cycles"):
        r.cyclic(gap=3.0, lr=1 / 6, steps=41)
    with pytest.raises(ZeroBlockError, match="lr ≤"):
        r.cyclic(gap=3.0, lr=0.2, steps=40)


@pytest.mark.parametrize("name", ENSEMBLES)
def test_the_largest_alignment_is_not_exceeded_and_is_reached(name: str) -> None:
    h = heterogeneous(16, 2, 4, seed=3)
    largest = ENSEMBLES[name].largest(h, 4)
    drawn = float(ENSEMBLES[name].sample(h, 4, 20_000).max())
    assert drawn <= largest + 1e-5
    if name in ("sparse", "block-sparse"):
        assert drawn == pytest.approx(largest)
    assert ENSEMBLES[name].largest(h, 16) == pytest.approx(h.intdim)


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
    frame = stability.apart(stability.Setting(16, 4, 20, 60), pairs=100)
    assert bool((frame.measured <= frame.bound).all())
    assert bool((frame.measured > 4 * frame.error).all())  # the runs part, and the error tells
    assert frame.bound.is_monotonic_increasing
    with pytest.raises(ZeroBlockError, match="at least 10"):
        stability.Setting(steps=5)


def test_a_step_of_a_pair_is_the_optimizers() -> None:
    """The coefficient of the batched runs is what ``ZeroOrder`` records for the same example and direction."""

    class Sigmoid(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = torch.nn.Parameter(torch.linspace(-1, 1, 8, dtype=torch.float64))

        def forward(self, signed: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(-(signed @ self.theta))

    model, row = Sigmoid(), stability.examples(3, 8, 0)[1]
    optimizer = zeroblock.ZeroOrder(
        model, 0.5, partition=zeroblock.whole, subspace=Haar(3), estimator=zeroblock.TwoSided(1e-2)
    )
    before = model.theta.detach().clone()
    optimizer.step(lambda: model(row))
    coeff = optimizer.record.coeffs[0]
    v = (before - model.theta.detach()) / (0.5 * coeff)
    mine = stability.coefficient(before.unsqueeze(0), row.unsqueeze(0), v.unsqueeze(0), 1e-2)
    assert float(mine) == pytest.approx(coeff, rel=1e-6)


def test_weighted_pairs_estimate_what_plain_pairs_do() -> None:
    """Weights sum to the chance that the example is drawn at all, and 1/step has the same mean under both laws."""
    setting = stability.Setting(16, 4, 20, 60)
    first, weight = stability.first_draws(setting, 20_000, torch.Generator().manual_seed(0))
    for value, exact in (
        (weight, 1 - 0.95**60), (weight / first, sum(0.95 ** (k - 1) / 20 / k for k in range(1, 61)))
    ):  # fmt: skip
        assert abs(float(value.mean()) - exact) < 4.5 * float(value.std()) / math.sqrt(20_000) + 1e-12


def test_generalization_and_the_recursion_stay_within_their_bounds() -> None:
    setting = stability.Setting(16, 4, 20, 60, rate=4.0)
    frame = stability.apart(setting, pairs=200)
    checks = stability_checks(setting, 100, 200, frame.measured.iloc[-1], frame.error.iloc[-1])
    assert [check.number for check in checks] == ["3.9", "C.2"]
    assert all(check.holds for check in checks)
    gap, error = stability.generalization(setting, 400)
    assert gap > 3 * error  # training data are fitted better than fresh ones


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
