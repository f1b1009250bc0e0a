"""The lemmas: which hold, which do not, and that the checks measure what they say."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from scipy import stats

from zeroblock.lab import event, smoothing
from zeroblock.lab.bounding import lemmas
from zeroblock.lab.check import Check, Role

FALSE_CLAIMS = {("B.3", "E‖u‖"), ("B.9", "descent")}
FALSE_STEPS = {
    ("3.2", "ρ ≤ s, Bernoulli"),
    ("3.3", "srank(M) ≤ s, Bernoulli"),
    ("3.3", "⟨E ĝ, ∇L⟩ = ‖∇L‖²"),
    ("3.3", "52αL ≤ 13/9"),
    ("3.6", "sphere's law on V_s"),
    ("3.6", "c₁ of the proof, λmax = 0.01"),
    ("B.8", "one-sided H"),
    ("B.9", "P(‖Mu‖² ≥ 2s)"),
    ("B.9", "root of P(long step)"),
    ("B.12", "2√(2s) = 2√s"),
    ("C.1", "one-sided H"),
    ("C.1", "root of a sum"),
}


@pytest.fixture(scope="module")
def checks() -> list[Check]:
    return lemmas(30_000)


def test_exactly_the_known_lines_fail(checks: list[Check]) -> None:
    failed = {(c.number, c.label) for c in checks if not c.holds}
    assert failed == FALSE_CLAIMS | FALSE_STEPS
    assert {(c.number, c.label) for c in checks if c.role is Role.STEP and not c.holds} == FALSE_STEPS


def test_every_lemma_of_the_appendix_is_checked(checks: list[Check]) -> None:
    numbers = {c.number for c in checks}
    assert {f"B.{i}" for i in range(1, 13)} | {"C.1"} <= numbers  # 3.9 and C.2 need runs: test_lab_bounds


def test_the_replacements_hold(checks: list[Check]) -> None:
    for check in checks:
        if not math.isnan(check.truth):
            assert dataclasses.replace(check, stated=check.truth).holds, check


def test_a_check_can_fail() -> None:
    def check(relation: str, measured: float) -> Check:
        return Check("", "", "", 1.0, relation, measured, 0.01)

    assert check("=", 1.03).holds
    assert not check("=", 1.05).holds
    assert check("≤", 0.2).holds
    assert not check("≤", 1.1).holds


@pytest.mark.parametrize("power", [0, 2])
def test_long_steps_agree_with_simulation(power: int) -> None:
    s = 4
    x = torch.randn(400_000, s, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    length = x[:, 0].abs() * x.norm(dim=1)
    sample = torch.where(length >= 2 * s, length**power, 0.0)
    error = float(sample.std()) / math.sqrt(len(sample))
    assert abs(float(sample.mean()) - event.long_step_moment(s, power)) < 4.5 * error
    assert error < 0.05 * float(sample.mean())


def test_the_isoperimetric_bound_lies_above_the_linear_loss_and_below_the_claim() -> None:
    for s in event.SIZES:
        assert event.long_step_moment(s, 0) <= event.long_step_bound(s) <= math.exp(-s / 2)
    assert event.long_step_moment(16, 0) == pytest.approx(8.58e-7, rel=1e-2)
    assert event.long_step_bound(16) == pytest.approx(1.84e-5, rel=1e-2)


def test_the_smallest_ratio_solves_its_equation() -> None:
    for s in (16, 64):
        ratio = event.smallest_ratio(s)
        assert 1 < ratio < 1.5
        tail = s * (s + 2) * float(stats.chi2.sf(4 * ratio * s, s + 4))
        assert tail == pytest.approx(3 * s**2 * math.exp(-s), rel=1e-6)


@pytest.fixture(scope="module")
def case() -> smoothing.Case:
    return list(smoothing.cases(2, torch.Generator().manual_seed(4)))[-2]


def test_smoothed_gradients_have_their_closed_form(case: smoothing.Case) -> None:
    """Against the mean gradient over 200,000 Gaussian points, and against autograd without smoothing."""
    loss, theta = case.loss, case.theta.clone().requires_grad_()
    (exact,) = torch.autograd.grad(loss.value(theta), theta)
    assert torch.allclose(loss.gradient(case.theta), exact)
    u = torch.randn(200_000, smoothing.DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for m in (None, case.m):
        points = case.theta + case.mu * (u if m is None else u @ m)
        phase = points @ loss.waves.T + loss.phases
        sample = -(torch.sin(phase) * loss.weights) @ loss.waves
        error = sample.std(0) / math.sqrt(len(u))
        assert bool(((sample.mean(0) - loss.gradient(case.theta, case.mu, m)).abs() < 4.5 * error + 1e-12).all())


def test_the_estimator_is_unbiased_for_m_squared_times_the_smoothed_gradient(case: smoothing.Case) -> None:
    u = torch.randn(200_000, smoothing.DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    sample = case.loss.estimate(case.theta, u @ case.m, case.mu)
    error = sample.std(0) / math.sqrt(len(u))
    gradient = case.loss.gradient(case.theta, case.mu, case.m)
    assert bool(((sample.mean(0) - case.m @ (case.m @ gradient)).abs() < 4.5 * error).all())
    assert not bool(((sample.mean(0) - gradient).abs() < 4.5 * error).all())  # which the paper takes it for


def test_the_envelope_bounds_the_hessian_from_both_sides(case: smoothing.Case) -> None:
    loss = case.loss
    hessian = -(loss.waves.T * (loss.weights * torch.cos(loss.waves @ case.theta + loss.phases))) @ loss.waves
    for sign in (1, -1):
        assert float(torch.linalg.eigvalsh(loss.envelope - sign * hessian)[0]) > -1e-12
    assert float(torch.linalg.eigvalsh(loss.envelope)[-1]) == pytest.approx(1)
