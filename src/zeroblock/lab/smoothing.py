"""Lemmas B.1, B.6 to B.10 and C.1 on losses whose smoothed gradients are known in closed form.

    L(θ) = Σ_k c_k cos(w_kᵀθ + b_k)        E L(θ + μMu) = Σ_k c_k e^(-μ²‖Mw_k‖²/2) cos(w_kᵀθ + b_k)

Such a loss meets every condition of the paper everywhere: it is bounded, its gradient is bounded, and
-H ⪯ ∇²L ⪯ H with H = Σ|c_k| w_k w_kᵀ.  It is scaled so that λmax(H) = L = 1.  Each check reports the largest ratio of
the two sides over random losses, points, projections and smoothings; it is at most 1 if the lemma holds.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import torch
from scipy import stats
from torch import Tensor

from .check import Check, Role, mean_of

DIM = 24
WAVES = 10
SMOOTHINGS = (0.03, 0.3, 1.0, 3.0)
"""Values of μ; with λmax(H) = 1 the loss oscillates within a few units, so the largest μ smooths it away."""


@dataclasses.dataclass(frozen=True)
class CosineLoss:
    """A sum of cosines.

    Args:
        waves: w, (K, d).
        weights: c, (K,).
        phases: b, (K,).
    """

    waves: Tensor
    weights: Tensor
    phases: Tensor

    @classmethod
    def random(cls, generator: torch.Generator, lean: float, d: int = DIM, count: int = WAVES) -> CosineLoss:
        """A random loss with λmax(H) = 1; with a ``lean`` its waves interfere, and smoothing damps them unevenly."""
        waves = torch.randn(count, d, dtype=torch.float64, generator=generator)
        waves = (waves + lean * torch.randn(d, dtype=torch.float64, generator=generator)) / math.sqrt(d)
        weights = torch.rand(count, dtype=torch.float64, generator=generator) * 2 - 1
        phases = torch.rand(count, dtype=torch.float64, generator=generator) * 2 * math.pi
        loss = cls(waves, weights, phases)
        return cls(waves, weights / float(torch.linalg.eigvalsh(loss.envelope)[-1]), phases)

    @property
    def envelope(self) -> Tensor:
        """H, (d, d)."""
        return (self.waves.T * self.weights.abs()) @ self.waves

    def _damped(self, mu: float, m: Tensor | None) -> Tensor:
        """c_k e^(-μ²‖Mw_k‖²/2), (K,); M is the identity if it is None."""
        lengths = (self.waves if m is None else self.waves @ m).square().sum(1)
        return self.weights * torch.exp(-(mu**2) * lengths / 2)

    def value(self, theta: Tensor, mu: float = 0.0) -> Tensor:
        """L_μ at points of (..., d)."""
        return torch.cos(theta @ self.waves.T + self.phases) @ self._damped(mu, None)

    def gradient(self, theta: Tensor, mu: float = 0.0, m: Tensor | None = None) -> Tensor:
        """∇L_{μ,M} at one point, (d,)."""
        return -(self._damped(mu, m) * torch.sin(self.waves @ theta + self.phases)) @ self.waves

    def estimate(self, theta: Tensor, v: Tensor, mu: float) -> Tensor:
        """ĝ for directions v, (n, d)."""
        base, shift = self.waves @ theta + self.phases, mu * v @ self.waves.T  # (K,), (n, K)
        coeff = (torch.cos(base + shift) - torch.cos(base - shift)) @ self.weights / (2 * mu)
        return coeff.unsqueeze(1) * v


@dataclasses.dataclass(frozen=True)
class Case:
    """One loss, point, projection and smoothing."""

    loss: CosineLoss
    theta: Tensor
    m: Tensor
    mu: float

    @property
    def s(self) -> float:
        """srank(M), with σmax(M) = 1."""
        return float(self.m.square().sum())

    @property
    def rho(self) -> float:
        """Tr(MHM) / λmax(H), λmax(H) = 1."""
        return float((self.m @ self.loss.envelope @ self.m).trace())

    @property
    def r(self) -> float:
        """intdim(H)."""
        return float(self.loss.envelope.trace())


def cases(count: int, generator: torch.Generator) -> Iterator[Case]:
    """``count`` random losses, each at every μ with a projection and with an M of decaying spectrum, of rank 4 or 8."""
    for index in range(count):
        loss = CosineLoss.random(generator, lean=2.0 * (index % 2))
        theta = torch.randn(DIM, dtype=torch.float64, generator=generator) * 3
        rank = 4 if index % 4 < 2 else 8
        u = torch.linalg.qr(torch.randn(DIM, rank, dtype=torch.float64, generator=generator)).Q
        sigma = torch.ones(rank, dtype=torch.float64)
        for spectrum, mu in itertools.product((sigma, sigma.cumsum(0).flip(0) / rank), SMOOTHINGS):
            yield Case(loss, theta, (u * spectrum) @ u.T, mu)


def _largest(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """The largest ratio and its standard error."""
    return max(pairs, key=lambda pair: pair[0])


def smoothed(count: int = 60, seed: int = 0) -> list[Check]:
    """Lemmas B.1, B.6 and B.8: all sides in closed form."""
    generator = torch.Generator().manual_seed(seed)
    aligned, near, square, intrinsic, intrinsic_square, plain = ([] for _ in range(6))
    for case in cases(count, generator):
        mu, s, r, d = case.mu, case.s, case.r, DIM
        g = case.loss.gradient(case.theta)
        g_mu = case.loss.gradient(case.theta, mu)
        g_m = case.loss.gradient(case.theta, mu, case.m)
        length = float(g_mu.norm())
        aligned.append(float(g_mu @ (g_mu - g_m)) / (length * mu * math.sqrt(2 * (d + s))))
        distance = float((g_mu - g).norm())
        near.append(distance / (mu * (d + 3) ** 1.5 / 2))
        plain.append(distance / (mu * math.sqrt(d)))
        square.append(float(g @ g) / (mu**2 * (d + 3) ** 3 / 2 + 2 * length**2))
        intrinsic.append(distance / (math.sqrt(3) / 2 * mu * r * math.sqrt(d)))
        intrinsic_square.append(float(g @ g) / (3 * mu**2 * r**2 * d + 2 * length**2))
    what = f"{count} losses, 2 M, {len(SMOOTHINGS)} μ; exact"
    concave, event = DIM * (DIM + 2) / 4, float(stats.chi2.sf(4 * DIM, DIM))
    return [
        Check(
            "B.1",
            "alignment of gradients",
            "⟨∇L_μ, ∇L_{μ,M}⟩ ≥ ‖∇L_μ‖² - ‖∇L_μ‖μL√(2(d+s)), ratio",
            1.0,
            "≤",
            max(aligned),
            reading=what,
        ),
        Check("B.6", "‖∇L_μ - ∇L‖", "‖∇L_μ - ∇L‖ ≤ ½μL(d+3)^(3/2), ratio", 1.0, "≤", max(near), reading=what),
        Check("B.6", "‖∇L‖²", "‖∇L‖² ≤ ½μ²L²(d+3)³ + 2‖∇L_μ‖², ratio", 1.0, "≤", max(square), reading=what),
        Check(
            "B.8",
            "‖∇L_μ - ∇L‖",
            "‖∇L_μ - ∇L‖ ≤ (√3/2)μLr√d, ratio",
            1.0,
            "≤",
            max(intrinsic),
            reading="two-sided -H ⪯ ∇²L ⪯ H; without the lemma's second, exponentially small term",
        ),
        Check(
            "B.8", "‖∇L‖²", "‖∇L‖² ≤ 3μ²L²r²d + 2‖∇L_μ‖², ratio", 1.0, "≤", max(intrinsic_square), reading="as above"
        ),
        Check(
            "B.8",
            "one-sided H",
            f"E[(remainder/μ)²] ≤ ¾μ²L²r² + … from ∇²L ⪯ H (concave, d = {DIM}, r = 1)",
            0.75 + (DIM + 4) ** 2 / 4 * event,
            "≤",
            concave,
            role=Role.STEP,
            reading="the one-sided bound of Assumption 3.1; with -H ⪯ ∇²L as well the step holds",
        ),
        Check(
            "B.8",
            "‖∇L_μ - ∇L‖ ≤ μL√d",
            "‖∇L_μ - ∇L‖ ≤ μL√d, ratio",
            1.0,
            "≤",
            max(plain),
            role=Role.OURS,
            reading="L-smoothness alone; smaller than B.6, and than B.8 for r ≥ 2/√3",
        ),
    ]


def estimated(draws: int = 20_000, count: int = 12, seed: int = 1) -> list[Check]:
    """Lemmas B.7, B.9, B.10 and C.1: expectations over ``draws`` directions per case."""
    generator = torch.Generator().manual_seed(seed)
    norm, second, descent, apart = ([] for _ in range(4))
    for case in cases(count, generator):
        mu, s, loss, theta = case.mu, case.s, case.loss, case.theta
        v = torch.randn(draws, DIM, dtype=torch.float64, generator=generator) @ case.m
        estimate = loss.estimate(theta, v, mu)
        gradient = float(loss.gradient(theta).square().sum())
        square = estimate.square().sum(1)
        curved = ((estimate @ loss.envelope) * estimate).sum(1)
        norm.append(_over(square, 7.5 * mu**2 * s**3 + 4 * (s + 2) * gradient))
        second.append(_over(curved, 13 * mu**2 * s**2 * case.rho + 9 * case.rho * gradient))
        g_mu = loss.gradient(theta, mu)
        first = float(g_mu @ (case.m @ (case.m @ loss.gradient(theta, mu, case.m))))
        alpha = 1 / (case.rho + 2)
        # fall - (α·first - ½α²·E ĝᵀHĝ) must not be negative; use units of α·first where that is not tiny
        spare = loss.value(theta, mu) - loss.value(theta - alpha * estimate, mu) + alpha**2 / 2 * curved
        if first > 1e-3 * gradient:
            value, error = mean_of(spare / (alpha * first))
            descent.append((2 - value, error))  # at most 1 where the spare is at least α·first
        for distance in (0.1, 1.0):
            other = theta + distance * _unit(generator)
            change = (estimate - loss.estimate(other, v, mu)).norm(dim=1)
            bound = math.sqrt(3 * s) * mu * (case.rho + s * math.exp(-s / 2)) + math.sqrt(s) * distance
            apart.append(_over(change, bound))
    what = f"{count} losses, 2 M, {len(SMOOTHINGS)} μ, {draws:,} draws each; no minibatch noise"
    return [
        Check("B.7", "E‖ĝ‖²", "E‖ĝ‖² ≤ 15μ²L²s³/2 + 4(s+2)‖∇L‖², ratio", 1.0, "≤", *_largest(norm), reading=what),
        *_linear_descent(draws, generator),
        Check(
            "B.9",
            "descent, with M²",
            "the same with M²∇L_{μ,M}, α = 1/(ρ+2)",
            1.0,
            "≤",
            *_largest(descent),
            role=Role.OURS,
            reading=what,
        ),
        Check(
            "B.10",
            "second-order term",
            "E[ĝᵀHĝ] ≤ 13μ²L³s²ρ + 9Lρ‖∇L‖², ratio",
            1.0,
            "≤",
            *_largest(second),
            reading=what,
        ),
        Check(
            "C.1",
            "same data point",
            "E‖ĝ(θ) - ĝ(θ')‖ ≤ √(3s)·μL(ρ + s·e^(-s/2)) + L√s·δ, ratio",
            1.0,
            "≤",
            *_largest(apart),
            reading="two-sided H; μLρ as in the proof (the statement writes 4Lρ)",
        ),
        *_concave_remainder(draws, generator),
    ]


def _unit(generator: torch.Generator) -> Tensor:
    x = torch.randn(DIM, dtype=torch.float64, generator=generator)
    unit: Tensor = x / x.norm()
    return unit


def _over(values: Tensor, bound: float) -> tuple[float, float]:
    mean, error = mean_of(values)
    return mean / bound, error / bound


def _linear_descent(draws: int, generator: torch.Generator) -> list[Check]:
    """Lemma B.9 for L(θ) = gᵀθ: L_μ falls by α⟨g, ĝ⟩, and the lemma claims at least α‖g‖²; M is Haar."""
    from .batched import haar

    d, s = 32, 4
    fall = haar(10 * draws, d, s, generator)[:, 0].square()  # ⟨g, v⟩² with ‖g‖ = 1
    mean, error = mean_of(fall)
    return [
        Check(
            "B.9",
            "descent",
            "L_μ falls by ≥ α⟨∇L_μ, ∇L_{μ,M}⟩ - …: claimed / measured (d/s = 8)",
            1.0,
            "≤",
            1 / mean,
            error / mean**2,
            truth=d / s,
            reading="linear loss: all other terms vanish; Haar M",
        ),
    ]


def _concave_remainder(draws: int, generator: torch.Generator) -> list[Check]:
    """The step of Lemma C.1 that bounds |L(θ+μMu) - L(θ) - μ⟨∇L, Mu⟩| from ∇²L ⪯ H, on L = -½‖θ‖²."""
    s, rho = 16, 1.0
    square = (torch.randn(10 * draws, s, dtype=torch.float64, generator=generator).square().sum(1) / 4).square()
    stated = 3 / 16 * (rho**2 + s**2 * math.exp(-s / 4))
    return [
        Check(
            "C.1",
            "one-sided H",
            f"E[(remainder/2μ)²] ≤ (3/16)μ²L²(ρ² + s²e^(-s/4)) (concave, s = {s}, ρ = 1)",
            stated,
            "≤",
            *mean_of(square),
            truth=s * (s + 2) / 16,
            role=Role.STEP,
            reading="the one-sided bound of Assumption 3.1; with -H ⪯ ∇²L as well the step holds",
        ),
    ]
