"""Lemmas B.2 to B.5: traces, moments of Gaussian norms and quadratic forms, and the mean of the estimator."""

from __future__ import annotations

import math

import torch

from .check import Check, Role, mean_of

DIM = 16
"""Dimension of the Gaussian vectors whose norms are measured."""


def moments(draws: int, seed: int = 0) -> list[Check]:
    """Every moment, from ``draws`` Gaussian vectors."""
    generator = torch.Generator().manual_seed(seed)
    return [*_traces(generator), *_norms(draws, generator), *_forms(draws, generator), *_estimator(draws, generator)]


def _traces(generator: torch.Generator) -> list[Check]:
    """The largest Tr(AB) / (Tr(A)·Tr(B)) of 1,000 pairs of random semi-definite matrices of every rank."""
    worst = 0.0
    for rank in range(1, 9):
        x, y = (torch.randn(125, 8, rank, dtype=torch.float64, generator=generator) for _ in range(2))
        a, b = x @ x.mT, y @ y.mT
        trace = (a * b).sum((1, 2))
        worst = max(worst, float((trace / (a.diagonal(0, 1, 2).sum(1) * b.diagonal(0, 1, 2).sum(1))).max()))
    return [Check("B.2", "trace of a product", "Tr AB ≤ Tr A · Tr B, largest ratio of 1,000 pairs", 1.0, "≤", worst)]


def _norms(draws: int, generator: torch.Generator) -> list[Check]:
    d = DIM
    norm = torch.randn(draws, d, dtype=torch.float64, generator=generator).norm(dim=1)
    chi = math.sqrt(2) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))
    return [
        Check(
            "B.3",
            "E‖u‖",
            f"E‖u‖ = 1 (d = {d})",
            1.0,
            "=",
            *mean_of(norm),
            truth=chi,
            reading="a slip in copying E‖u‖⁰ = 1; no proof uses it",
        ),
        Check("B.3", "E‖u‖²", f"E‖u‖² = d (d = {d})", d, "=", *mean_of(norm**2)),
        Check("B.3", "E‖u‖⁴", f"E‖u‖⁴ ≤ (d+4)² (d = {d})", (d + 4) ** 2, "≤", *mean_of(norm**4)),
        Check("B.3", "E‖u‖⁶", f"E‖u‖⁶ ≤ (d+6)³ (d = {d})", (d + 6) ** 3, "≤", *mean_of(norm**6)),
        Check("B.3", "E‖u‖ ≤ √d", f"E‖u‖ ≤ √d (d = {d})", math.sqrt(d), "≤", *mean_of(norm), role=Role.OURS),
    ]


def _forms(draws: int, generator: torch.Generator) -> list[Check]:
    a = torch.tensor(
        [3.0, 2.0, 1.0, 0.5, 0.0, 0.0], dtype=torch.float64
    )  # a Gaussian form depends on the spectrum only
    form = torch.randn(draws, len(a), dtype=torch.float64, generator=generator).square() @ a
    t1, t2, t3, t4 = (float((a**k).sum()) for k in (1, 2, 3, 4))
    fourth = t1**4 + 32 * t1 * t3 + 12 * t2**2 + 12 * t1**2 * t2 + 48 * t4
    return [
        Check("B.4", "first moment", "E[uᵀAu] = Tr A", t1, "=", *mean_of(form)),
        Check("B.4", "second moment", "E[(uᵀAu)²] = (Tr A)² + 2 Tr A²", t1**2 + 2 * t2, "=", *mean_of(form**2)),
        Check("B.4", "third moment", "E[(uᵀAu)³], as stated", t1**3 + 6 * t1 * t2 + 8 * t3, "=", *mean_of(form**3)),
        Check("B.4", "fourth moment", "E[(uᵀAu)⁴], as stated", fourth, "=", *mean_of(form**4)),
        Check("B.4", "second, bound", "E[(uᵀAu)²] ≤ 3 (Tr A)²", 3 * t1**2, "≤", *mean_of(form**2)),
        Check("B.4", "third, bound", "E[(uᵀAu)³] ≤ 15 (Tr A)³", 15 * t1**3, "≤", *mean_of(form**3)),
        Check("B.4", "fourth, bound", "E[(uᵀAu)⁴] ≤ 105 (Tr A)⁴", 105 * t1**4, "≤", *mean_of(form**4)),
    ]


def _estimator(draws: int, generator: torch.Generator) -> list[Check]:
    d, s = 32, 4
    g = torch.randn(d, dtype=torch.float64, generator=generator)
    q = torch.randn(d, s, dtype=torch.float64, generator=generator)
    x = torch.randn(5 * draws, s, dtype=torch.float64, generator=generator) @ q.T  # an eighth moment, hence more draws
    inner = float((q @ q.T).trace() * (q.T @ g).square().sum() + 2 * (q @ (q.T @ g)).square().sum())
    values = (x @ g).square() * x.square().sum(1)
    u = torch.linalg.qr(q).Q
    lifted = torch.randn(draws, s, dtype=torch.float64, generator=generator) @ u.T
    along = (lifted @ g).square() / float(g @ g)  # ⟨ĝ, ∇L⟩ of a linear loss, which has no smoothing error
    projected = float((u.T @ g).square().sum() / (g @ g))
    return [
        Check("B.5", "E‖⟨a, Qu⟩Qu‖²", "E‖⟨a, Qu⟩Qu‖², as stated", inner, "=", *mean_of(values)),
        Check(
            "3.3",
            "⟨E ĝ, ∇L⟩ = ‖∇L‖²",
            "⟨E ĝ, ∇L⟩ = ‖∇L‖² (d = 32, s = 4)",
            1.0,
            "=",
            *mean_of(along),
            truth=projected,
            role=Role.STEP,
            reading="linear loss, so no smoothing error; E ĝ = M²∇L",
        ),
    ]
