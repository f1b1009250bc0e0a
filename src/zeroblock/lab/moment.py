"""The identities behind the proofs, each measured: what the paper states, what is true, what a simulation gives."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from .alignment import ENSEMBLES
from .bounds import Tail
from .quadratic import Hessian, hessian


@dataclasses.dataclass(frozen=True)
class Check:
    """One statement.

    Args:
        statement: in a line.
        stated: the value or bound the paper states.
        relation: "=" or "≤": how the measured value stands to it.
        measured: by simulation, or exactly where error is 0.
        error: standard error of ``measured``.
        truth: the value that does hold, in closed form; NaN where ``stated`` is it.
    """

    statement: str
    stated: float
    relation: str
    measured: float
    error: float = 0.0
    truth: float = math.nan

    @property
    def holds(self) -> bool:
        """Within four standard errors and rounding."""
        slack = 4 * self.error + 1e-9 * max(1.0, abs(self.stated))
        difference = self.measured - self.stated
        return abs(difference) <= slack if self.relation == "=" else difference <= slack


def _mean(values: Tensor) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / math.sqrt(values.numel()))


def checks(draws: int = 200_000, seed: int = 0) -> list[Check]:
    """Every identity, by ``draws`` Gaussian vectors where it is simulated."""
    generator = torch.Generator().manual_seed(seed)
    return [
        *_norms(draws, generator),
        *_forms(draws, generator),
        *_estimator(draws, generator),
        *_events(),
        *_tails(seed),
        *_ranges(draws, generator),
    ]


def _norms(draws: int, generator: torch.Generator) -> list[Check]:
    d = 16
    norm = torch.randn(draws, d, dtype=torch.float64, generator=generator).norm(dim=1)
    chi = math.sqrt(2) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))
    return [
        Check(f"E‖u‖ = 1 (d = {d})", 1.0, "=", *_mean(norm), truth=chi),
        Check(f"E‖u‖ ≤ √d (d = {d})", math.sqrt(d), "≤", *_mean(norm)),
        Check(f"E‖u‖² = d (d = {d})", d, "=", *_mean(norm**2)),
        Check(f"E‖u‖⁴ ≤ (d+4)² (d = {d})", (d + 4) ** 2, "≤", *_mean(norm**4)),
        Check(f"E‖u‖⁶ ≤ (d+6)³ (d = {d})", (d + 6) ** 3, "≤", *_mean(norm**6)),
    ]


def _forms(draws: int, generator: torch.Generator) -> list[Check]:
    a = torch.tensor([3.0, 2.0, 1.0, 0.5, 0.0, 0.0], dtype=torch.float64)  # Gaussian vectors see the spectrum only
    form = torch.randn(draws, len(a), dtype=torch.float64, generator=generator).square() @ a
    t1, t2, t3, t4 = (float((a**k).sum()) for k in (1, 2, 3, 4))
    fourth = t1**4 + 32 * t1 * t3 + 12 * t2**2 + 12 * t1**2 * t2 + 48 * t4
    return [
        Check("E[uᵀAu] = Tr A", t1, "=", *_mean(form)),
        Check("E[(uᵀAu)²] = (Tr A)² + 2Tr A²", t1**2 + 2 * t2, "=", *_mean(form**2)),
        Check("E[(uᵀAu)³] = (Tr A)³ + 6Tr A·Tr A² + 8Tr A³", t1**3 + 6 * t1 * t2 + 8 * t3, "=", *_mean(form**3)),
        Check("E[(uᵀAu)⁴] as in the lemma", fourth, "=", *_mean(form**4)),
        Check("E[(uᵀAu)²] ≤ 3(Tr A)²", 3 * t1**2, "≤", *_mean(form**2)),
        Check("E[(uᵀAu)³] ≤ 15(Tr A)³", 15 * t1**3, "≤", *_mean(form**3)),
        Check("E[(uᵀAu)⁴] ≤ 105(Tr A)⁴", 105 * t1**4, "≤", *_mean(form**4)),
        Check("Tr AB ≤ Tr A·Tr B", t1 * 3.0, "≤", float((a * torch.tensor([1.0, 0, 2, 0, 0, 0])).sum())),
    ]


def _estimator(draws: int, generator: torch.Generator) -> list[Check]:
    d, s = 32, 4
    g = torch.randn(d, dtype=torch.float64, generator=generator)
    q = torch.randn(d, s, dtype=torch.float64, generator=generator)
    x = torch.randn(draws, s, dtype=torch.float64, generator=generator) @ q.T
    inner = float((q @ q.T).trace() * (q.T @ g).square().sum() + 2 * (q @ (q.T @ g)).square().sum())
    values = (x @ g).square() * x.square().sum(1)
    u = torch.linalg.qr(q).Q
    lifted = torch.randn(draws, s, dtype=torch.float64, generator=generator) @ u.T
    estimate = (lifted @ g).unsqueeze(1) * lifted  # ĝ of a linear loss: no smoothing error at all
    along = estimate @ g / float(g @ g)
    projected = float((u.T @ g).square().sum() / (g @ g))
    unit = u @ (u.T @ g)
    length = (lifted @ (unit / unit.norm())).abs() * lifted.norm(dim=1)
    return [
        Check("E‖⟨a, Qu⟩Qu‖² = Tr(QQᵀ)‖Qᵀa‖² + 2aᵀ(QQᵀ)²a", inner, "=", *_mean(values)),
        Check("⟨E ĝ, ∇L⟩ = ‖∇L‖² for ĝ along Mu (proof of Theorem 3.3)", 1.0, "=", *_mean(along), truth=projected),
        Check("E|⟨v, Mu⟩|‖Mu‖ ≤ √s‖v‖", math.sqrt(s), "≤", *_mean(length)),
    ]


def _chi_square_tail(s: int, at: float) -> float:
    """P(χ²_s ≥ at)."""
    return float(torch.special.gammaincc(torch.tensor(s / 2).double(), torch.tensor(at / 2).double()))


def _events() -> list[Check]:
    s = 16
    tail = _chi_square_tail(s, 2 * s)
    chernoff = math.exp(-s / 2 * (1 - math.log(2)))
    root = math.sqrt(3 / 16 * (0.01 + s**2 * math.exp(-s / 4)))
    return [
        Check(f"P(‖Mu‖² ≥ 2s) ≤ exp(-s/2) (s = {s})", math.exp(-s / 2), "≤", tail, truth=chernoff),
        Check(f"P(‖Mu‖² ≥ 2s) ≤ exp(-s(1-ln 2)/2) (s = {s})", chernoff, "≤", tail),
        Check(
            f"√(3ρ²/16 + 3s²exp(-s/4)/16) ≤ (√3/4)(ρ + s·exp(-s/2)) (s = {s}, ρ = 0.1)",
            math.sqrt(3) / 4 * (0.1 + s * math.exp(-s / 2)), "≤", root,
            truth=math.sqrt(3) / 4 * (0.1 + s * math.exp(-s / 8)),
        ),
    ]  # fmt: skip


def _tails(seed: int) -> list[Check]:
    h = hessian(64, 16, seed=seed)
    small = Hessian(h.blocks / 1000, h.spectra / 1000, h.vectors)
    rhos = ENSEMBLES["low-rank"].sample(small, 8, 20_000, seed)
    excess = 0.1
    share = (rhos >= Tail(small, 8).threshold(excess)).double()
    return [
        Check(
            "low-rank tail with c₁ = 1/(8λmax²), H scaled to λmax = 0.01",
            Tail(small, 8).low_rank(excess, "published"), "≤", *_mean(share),
            truth=Tail(small, 8).low_rank(excess),
        )
    ]  # fmt: skip


def _ranges(draws: int, generator: torch.Generator) -> list[Check]:
    d, s = 64, 16
    kept = (torch.rand(min(draws, 20_000), d, generator=generator) < s / d).sum(1).double()
    return [Check("ρ ≤ min(r, s) for a Bernoulli mask, H = I (d = 64, s = 16)", s, "≤", float(kept.max()), truth=d)]
