"""Probabilities and concentration in the proofs: long steps, small exponents, spheres, and tails of ρ."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import integrate, optimize, special, stats

from .alignment import ENSEMBLES
from .bounds import Tail
from .check import Check, Role, mean_of
from .projection import orthonormalised
from .quadratic import Hessian, hessian

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96)
"""The 16 values of s at which the probability of a long step is computed."""


def long_step_moment(s: int, power: int) -> float:
    """E[(|x₁|·‖v‖)^power; |x₁|·‖v‖ ≥ 2s] for v ~ N(0, I_s).

    |x₁|·‖v‖ is ‖ĝ‖/G for a linear loss whose gradient lies in range(M).
    ‖v‖² = x₁² + R with R ~ χ²_{s-1}; the event is R ≥ 4s²/x₁² - x₁².  ``power`` 0 gives P[Eᶜ] with μ → 0, which is the
    largest over μ, and 2 gives E[‖ĝ‖²; Eᶜ].  The result is exact up to quadrature.
    """

    def inner(x: float) -> float:
        bound = max(0.0, 4 * s * s / (x * x) - x * x)
        if power == 0:
            tail = stats.chi2.sf(bound, s - 1) if s > 1 else float(bound == 0)
        elif s > 1:  # E[x²(x² + R); R ≥ b], with E[R; R ≥ b] = k·P(χ²_{k+2} ≥ b)
            tail = x * x * (x * x * stats.chi2.sf(bound, s - 1) + (s - 1) * stats.chi2.sf(bound, s + 1))
        else:
            tail = x**4 * float(bound == 0)
        return 2 * float(tail) * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    top = math.sqrt(2 * s)  # beyond it the event is certain
    body = integrate.quad(inner, 1e-9, top, points=[min(top / 2, 4.0)], limit=200)[0]
    return float(body + integrate.quad(inner, top, top + 40, limit=200)[0])


def long_step_bound(s: int) -> float:
    """An upper bound of P[Eᶜ] for every G-Lipschitz loss.

    The two-sided difference F(u) = (L(θ+μMu) - L(θ-μMu))/2μ is odd, so its median is 0, and G-Lipschitz: Gaussian
    isoperimetry gives P(|F| ≥ aG) ≤ 2Φ(-a).  A long step, |F|·‖Mu‖ ≥ 2sG, needs |F| ≥ aG or ‖Mu‖ ≥ 2s/a;
    the best a counts.
    """

    def total(a: float) -> float:
        return float(2 * stats.norm.sf(a) + stats.chi2.sf(4 * s * s / (a * a), s))

    return min(1.0, float(optimize.minimize_scalar(total, bounds=(0.1, 2.0 * math.sqrt(s) + 2), method="bounded").fun))


def smallest_ratio(s: int) -> float:
    """The smallest d/s for which the tail term of Lemma C.1 is at most (√3/4)·s·e^(-s/2), from its own event.

    That event is ‖Mu‖ > 2√d (more is needed where 2αsG > 0), and E[‖Mu‖⁴; ‖Mu‖² ≥ 4d] = s(s+2)·P(χ²_{s+4} ≥ 4d).
    """
    allowed = 3 * s * s * math.exp(-s)

    def excess(ratio: float) -> float:
        return float(np.log(s * (s + 2)) + stats.chi2.logsf(4 * ratio * s, s + 4) - math.log(allowed))

    return 1.0 if excess(1.0) <= 0 else float(optimize.brentq(excess, 1.0, 20.0))


def events() -> list[Check]:
    """Lemmas B.9 and C.1 and the proof of Theorem 3.3: probabilities of events, and the lines that use them."""
    s = 16
    surrogate = float(stats.chi2.sf(2 * s, s))
    linear = max(long_step_moment(k, 0) / math.exp(-k / 2) for k in SIZES)
    lipschitz = max(long_step_bound(k) / math.exp(-k / 2) for k in SIZES)
    second = max(long_step_moment(k, 2) / (84 * k * math.exp(-k / 2)) for k in SIZES)
    rho = 0.1
    root = math.sqrt(3 / 16 * (rho**2 + s**2 * math.exp(-s / 4)))
    alpha_l = 1 / (36 * 0.5 + 336 * 64 * math.exp(-32))  # αL at the largest step for ρmax = 1/2, s = 64
    chernoff = math.exp(-s * (1 - math.log(2)) / 2)
    return [
        Check(
            "B.9",
            "P(‖Mu‖² ≥ 2s)",
            f"P(‖Mu‖² ≥ 2s) ≤ exp(-s/2) (s = {s})",
            math.exp(-s / 2),
            "≤",
            surrogate,
            truth=chernoff,
            role=Role.STEP,
            reading="the proof's stand-in for the event of a long step",
        ),
        Check(
            "B.9",
            "P(long step), linear",
            "P[Eᶜ] ≤ exp(-s/2), linear loss, largest ratio of 16 s",
            1.0,
            "≤",
            linear,
            reading="μ → 0 and ∇L in range(M), the worst case; exact",
        ),
        Check(
            "B.9",
            "P(long step), Lipschitz",
            "P[Eᶜ] ≤ exp(-s/2), any Lipschitz loss, 16 s",
            1.0,
            "≤",
            lipschitz,
            reading="an upper bound by Gaussian isoperimetry, not a sample",
        ),
        Check(
            "B.9",
            "long-step term",
            "½E[‖ĝ‖²; Eᶜ] ≤ 42s·exp(-s/2), linear loss, 16 s",
            1.0,
            "≤",
            second,
            reading="μ → 0, ‖∇L‖ = G; exact",
        ),
        Check(
            "B.9",
            "root of P(long step)",
            "√P[Eᶜ] → exp(-s/2) where P[Eᶜ] ≤ exp(-s/2) (s = 16)",
            math.exp(-s / 2),
            "≤",
            math.exp(-s / 4),
            role=Role.STEP,
            reading="the root of the bound that the proof has just stated",
        ),
        Check(
            "C.1",
            "root of a sum",
            f"√(3ρ²/16 + 3s²e^(-s/4)/16) ≤ (√3/4)(ρ + s·e^(-s/2)) (s = {s}, ρ = {rho})",
            math.sqrt(3) / 4 * (rho + s * math.exp(-s / 2)),
            "≤",
            root,
            role=Role.STEP,
            truth=math.sqrt(3) / 4 * (rho + s * math.exp(-s / 8)),
            reading=f"as a line by itself; with the event's own probability e^(-s/2) suffices from d = "
            f"{max(smallest_ratio(k) for k in (16, 64)):.2f} s (s = 16 and 64)",
        ),
        Check(
            "3.3",
            "52αL ≤ 13/9",
            "52αL ≤ 13/9 (ρmax = 1/2, s = 64)",
            13 / 9,
            "≤",
            52 * alpha_l,
            role=Role.STEP,
            reading="true for ρmax ≥ 1; 52αLρ_t ≤ 13/9 always holds",
        ),
    ]


def spheres(draws: int, seed: int = 0) -> list[Check]:
    """Lemmas B.11 and B.12 and the step of Proposition 3.6 that joins them."""
    worst = 0.0
    for n in (1, 2, 3, 5, 10, 30, 100, 300):
        for angle in np.linspace(0.02, 1.5, 75):
            # the measure beyond distance ε of a half sphere, which is the worst half: a cap of S^{n+1} ⊂ R^{n+2}
            cap = special.betainc((n + 1) / 2, 0.5, math.cos(angle) ** 2) / 2
            worst = max(worst, cap / (math.sqrt(math.pi / 8) * math.exp(-n * angle**2 / 2)))
    d = 16
    radius = math.sqrt(d)  # V_d(R^d) = O(d) lies on the sphere of radius √d in d² dimensions
    step = 2 * math.sqrt(math.pi / 8) * math.exp(-(d * d - 2) / (2 * radius**2))
    ratio, constant = _lipschitz(draws, seed)
    return [
        Check(
            "B.11",
            "Lévy on spheres",
            "α(S^{n+1}; ε) ≤ √(π/8)·exp(-nε²/2), 8 n, 75 ε",
            1.0,
            "≤",
            worst,
            reading="exact caps; the half sphere is extremal by Lévy's isoperimetry",
        ),
        Check(
            "B.12",
            "Lipschitz constant",
            "|f(U) - f(V)| ≤ 2√s·λmax·‖U - V‖, largest ratio",
            1.0,
            "≤",
            ratio,
            reading="random pairs, near and far, four spectra",
        ),
        Check(
            "B.12",
            "2√(2s) = 2√s",
            "2√(2s) = 2√s in its proof (s = 1)",
            2.0,
            "=",
            2 * math.sqrt(2),
            role=Role.STEP,
            reading="⟨H(U+V), U-V⟩ ≤ λmax·2√s·‖U-V‖ proves the lemma in one line",
        ),
        Check("B.12", "half that constant", "the same with √s·λmax", 1.0, "≤", constant, role=Role.OURS),
        Check(
            "3.6",
            "sphere's law on V_s",
            f"P(|F - median| ≥ 1) ≤ the sphere's, on V_s(R^d) (s = d = {d})",
            step,
            "≤",
            0.5,
            role=Role.STEP,
            reading="F is the distance to SO(d): 1-Lipschitz, 0 or 2 with probability ½ each",
        ),
    ]


def _lipschitz(draws: int, seed: int) -> tuple[float, float]:
    """The largest |f(U) - f(V)| / (2√s·λmax·‖U - V‖), and the same without the 2."""
    generator = torch.Generator().manual_seed(seed)
    d, worst = 24, 0.0
    count = min(draws, 2000)
    for s in (1, 4, 12):
        for spectrum in (torch.linspace(1, 0, d), torch.ones(d), (torch.arange(d) < 1), (torch.arange(d) < d // 2)):
            h = spectrum.double()
            u = orthonormalised(torch.randn(count, d, s, dtype=torch.float64, generator=generator))
            for size in (0.01, 0.3, 3.0):
                moved = u + size * torch.randn(count, d, s, dtype=torch.float64, generator=generator) / math.sqrt(d)
                # also move along the gradient of f, where f changes fastest
                for v in (orthonormalised(moved), orthonormalised(u + size * h.unsqueeze(1) * u)):
                    change = ((u.square() - v.square()) * h.unsqueeze(1)).sum((1, 2)).abs()
                    distance = (u - v).flatten(1).norm(dim=1)
                    apart = distance > 1e-9
                    if bool(apart.any()):
                        worst = max(worst, float((change[apart] / distance[apart]).max()) / (2 * math.sqrt(s)))
    return worst, 2 * worst


def tails(draws: int, seed: int = 0) -> list[Check]:
    """Proposition 3.6 at two scales of H, and the rank and the range of ρ of Bernoulli masks."""
    h, excess = hessian(64, 16, seed=seed), 0.1
    checks = []
    for scale, words in ((1000.0, "λmax = 0.01"), (1.0, "λmax = 10")):
        scaled = Hessian(h.blocks / scale, h.spectra / scale, h.vectors)
        tail = Tail(scaled, 8)
        share = (ENSEMBLES["low-rank"].sample(scaled, 8, min(draws, 20_000), seed) >= tail.threshold(excess)).double()
        checks.append(
            Check(
                "3.6",
                f"c₁ of the proof, {words}",
                f"low-rank tail with c₁ = 1/(8λmax²), {words}",
                tail.low_rank(excess, "published"),
                "≤",
                *mean_of(share),
                truth=tail.low_rank(excess),
                role=Role.STEP,
                reading="the proposition promises only some constant c₁",
            )
        )
        if scale > 1:
            checks.append(
                Check(
                    "3.6",
                    "c₁ = (d-2)/(8d)",
                    f"low-rank tail with c₁ = (d-2)/(8d), {words}",
                    tail.low_rank(excess),
                    "≤",
                    *mean_of(share),
                    role=Role.OURS,
                )
            )
    d, s = 64, 16
    generator = torch.Generator().manual_seed(seed)
    kept = (torch.rand(min(draws, 20_000), d, generator=generator) < s / d).sum(1).double()
    checks += [
        Check(
            "3.3",
            "srank(M) ≤ s, Bernoulli",
            f"srank(M) ≤ s for a Bernoulli mask: share above s (d = {d}, s = {s})",
            0.0,
            "≤",
            *mean_of((kept > s).double()),
            role=Role.STEP,
            reading="the hypothesis of Theorem 3.3, when it is applied to the mask of Definition 3.5",
        ),
        Check(
            "3.2",
            "ρ ≤ s, Bernoulli",
            f"ρ ≤ min(r, s) for a Bernoulli mask, H = I (d = {d}, s = {s})",
            s,
            "≤",
            float(kept.max()),
            truth=d,
            role=Role.STEP,
            reading="the remark presumes srank(M) ≤ s, which the mask does not meet",
        ),
    ]
    return checks
