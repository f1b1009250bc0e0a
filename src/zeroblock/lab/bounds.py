"""The paper's bounds as calculators, with their preconditions checked and their constants written out.

Theorem 3.3 comes in three versions.  ``Rate.published`` is the last line of the paper's proof.  It does not hold in
general: the proof takes ∇L_{μ,M} for E[ĝ], but E[ĝ] = M²∇L_{μ,M}, so a step descends by α(s/d)‖∇L‖² and not by α‖∇L‖².
``Rate.corrected`` keeps that factor, and ``Rate.cyclic`` covers block descent in cycles; both are proven here for
quadratics and checked by ``lab bounds``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..errors import ZeroBlockError
from .alignment import block_values, expected
from .quadratic import Hessian


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ZeroBlockError(f"{name} must be positive and finite, got {value}")


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if not (value >= 0 and math.isfinite(value)):
            raise ZeroBlockError(f"{name} must be finite and not negative, got {value}")


def srank(matrix: Tensor) -> float:
    """Stable rank Σσᵢ² / σmax² of a matrix that is not zero."""
    sigma = torch.linalg.svdvals(matrix.double())
    _positive(sigma_max=float(sigma[0]))
    return float((sigma / sigma[0]).square().sum())


def intdim(matrix: Tensor) -> float:
    """Intrinsic dimension Tr(A) / λmax(A) of a symmetric positive semi-definite matrix that is not zero."""
    values = _semidefinite(matrix)
    return float(values.sum() / values[-1])


def rho(m: Tensor, h: Tensor) -> float:
    """Subspace alignment Tr(MᵀHM) / λmax(H) from the matrices themselves, (d, s) or (d, d) and (d, d)."""
    values = _semidefinite(h)
    if m.shape[0] != h.shape[0]:
        raise ZeroBlockError(f"M has {m.shape[0]} rows, H is {h.shape[0]}×{h.shape[0]}")
    return float((m.double() * (h.double() @ m.double())).sum() / values[-1])


def _semidefinite(matrix: Tensor) -> Tensor:
    a = matrix.double()
    if a.dim() != 2 or a.shape[0] != a.shape[1] or not torch.allclose(a, a.T, atol=1e-9 * float(a.abs().max())):
        raise ZeroBlockError("the matrix must be symmetric")
    values: Tensor = torch.linalg.eigvalsh(a)
    if float(values[0]) < -1e-9 * float(values.abs().max()) or float(values[-1]) <= 0:
        raise ZeroBlockError(f"the matrix must be positive semi-definite and not zero; its spectrum starts at "
                             f"{float(values[0]):.3g}")  # fmt: skip
    return values


@dataclasses.dataclass(frozen=True)
class Alignments:
    """A summary of ρ_t along a run: ρ̄ and ρmax."""

    mean: float
    max: float

    @classmethod
    def of(cls, rhos: Sequence[float] | Tensor) -> Alignments:
        """From the values ρ_1, …, ρ_T."""
        values = torch.as_tensor(rhos, dtype=torch.float64)
        if values.numel() == 0 or not bool((values >= 0).all()):
            raise ZeroBlockError("alignments are a sequence of numbers that are not negative, at least one")
        return cls(float(values.mean()), float(values.max()))


@dataclasses.dataclass(frozen=True)
class Rate:
    """Theorem 3.3 for one problem.

    Args:
        smoothness: L.
        d: dimension.
        s: srank(M_t) ≤ s.
        r: intdim(H) ≤ r ≤ d.
        rho: ρ̄ and ρmax of the run.
    """

    smoothness: float
    d: int
    s: float
    r: float
    rho: Alignments

    def __post_init__(self) -> None:
        _positive(L=self.smoothness, d=self.d, s=self.s, r=self.r, rho_mean=self.rho.mean)
        if self.s > self.d or self.r > self.d:
            raise ZeroBlockError(f"s = {self.s:g} and r = {self.r:g} cannot exceed d = {self.d}")
        if self.rho.mean > self.rho.max * (1 + 1e-12):
            raise ZeroBlockError(f"the mean alignment {self.rho.mean:g} exceeds the largest, {self.rho.max:g}")

    @property
    def max_step(self) -> float:
        """α ≤ 1 / (36Lρmax + 336Ls·exp(-s/2)), as published."""
        return 1 / (self.smoothness * (36 * self.rho.max + 336 * self.s * math.exp(-self.s / 2)))

    @property
    def max_step_corrected(self) -> float:
        """α ≤ 1 / (L(ρmax + 2)): the condition of the corrected rates."""
        return 1 / (self.smoothness * (self.rho.max + 2))

    def smoothing(self, steps: int) -> float:
        """μ = 1 / (L√(ρ̄dT)), the published order with constant 1."""
        _positive(steps=steps)
        return 1 / (self.smoothness * math.sqrt(self.rho.mean * self.d * steps))

    def published(self, *, gap: float, lr: float, steps: int, eps: float, noise: float = 0.0, batch: int = 1) -> float:
        """The right side of Theorem 3.3 with the constants of its proof.

            (1/T)Σ‖∇L(θ_t)‖² ≤ 3r²/(2ρ̄T) + 8Δ/(αT) + 8(d+s)/(ρ̄dT) + 13s²/(9dT) + 37s²/(42ρ̄dT) + σ²/B

        Args:
            gap: Δ = L_μ(θ_1) - L_μ(θ_T).
            lr: α; must not exceed ``max_step``.
            steps: T.
            eps: μ; must not exceed ``smoothing(steps)``.
            noise: σ², variance of a single example's gradient.
            batch: B.
        """
        self._check(gap, lr, steps, noise, batch, self.max_step)
        if eps > self.smoothing(steps) * (1 + 1e-9):
            raise ZeroBlockError(f"Theorem 3.3 needs eps ≤ {self.smoothing(steps):.3g} at {steps} steps, got {eps:g}")
        rho_t, d, s = self.rho.mean * steps, self.d, self.s
        smoothing = 3 * self.r**2 / (2 * rho_t) + 8 * (d + s) / (rho_t * d) + 37 * s**2 / (42 * rho_t * d)
        return smoothing + 13 * s**2 / (9 * d * steps) + 8 * gap / (lr * steps) + noise / batch

    def corrected(self, *, gap: float, lr: float, steps: int, noise: float = 0.0, batch: int = 1) -> float:
        """A bound that holds on a quadratic, where two-sided differences are exact.

            (1/T)ΣE‖∇L(θ_t)‖² ≤ 2(d/s)·Δ/(αT) + αL(ρmax + 2)·σ²/B

        M_t is a projection with E[M_t] = (s/d)·I, independent of θ_t, and ρ_t ≤ ρmax almost surely: take the ensemble's
        ``largest``, since the largest value seen in a run is not enough.  With A = MHM and a = M∇L,
        E[(aᵀu)²·uᵀAu] = ‖a‖²Tr A + 2aᵀAa ≤ L(ρ + 2)‖M∇L‖², so one step changes the loss by at most
        -α(s/d)‖∇L‖² + (α²/2)L(ρmax + 2)(s/d)(‖∇L‖² + σ²/B); α ≤ 1/(L(ρmax + 2)) and a sum over t give the line above.
        For isotropic E[M] on the range of H, s/d is E[ρ]/intdim(H): the 1/ρ̄ of the paper's experiment is this factor.
        """
        self._check(gap, lr, steps, noise, batch, self.max_step_corrected)
        curvature = self.smoothness * (self.rho.max + 2)
        return 2 * self.d / self.s * gap / (lr * steps) + lr * curvature * noise / batch

    def cyclic(self, *, gap: float, lr: float, steps: int) -> float:
        """The bound for block descent that visits each of N = d/s blocks once per cycle, in any order.

            (1/K)Σ_k E‖∇L(θ_{kN})‖² ≤ 4N(1 + κ²α²L²(s+2))·Δ/(αT),    κ = ⌈log₂N⌉/2,    K = T/N cycles

        The order may be fixed, shuffled, or chosen from the past; the quadratic is noiseless and
        α ≤ 1/(L(ρmax + 2)).  Proof: given the past, a step on block B lowers the loss in expectation by at least
        (α/2)‖∇_B L(θ_t)‖², as in ``corrected``.  Let θ_j be the point before the j-th step of a cycle.  Then
        ‖∇_{B_j}L(θ_0)‖² ≤ 2‖∇_{B_j}L(θ_j)‖² + 2‖P_{B_j}H(θ_j - θ_0)‖².  The vectors P_{B_j}H(θ_j - θ_0), stacked, are
        the strictly lower block triangle of H, in the order of the visits, applied to the cycle's steps -αĝ_i, which
        lie in different blocks.  Its norm is at most κL: halve the blocks; the triangle is that of the two halves plus
        one off-diagonal block, whose norm is at most L/2 since 0 ⪯ H ⪯ L.  With E‖ĝ_i‖² = (s+2)‖∇_{B_i}L(θ_i)‖², the
        sum over j is ‖∇L(θ_0)‖² ≤ 2(1 + κ²α²L²(s+2))·ΣE‖∇_{B_j}L(θ_j)‖² ≤ (4/α)(1 + …)·E[fall in the cycle].
        """
        self._check(gap, lr, steps, 0.0, 1, self.max_step_corrected)
        count = round(self.d / self.s)
        if count * self.s != self.d or steps % count:
            raise ZeroBlockError(
                f"{steps} steps over blocks of {self.s:g} in {self.d} dimensions do not make whole cycles"
            )
        kappa = math.ceil(math.log2(count)) / 2
        spread = (kappa * lr * self.smoothness) ** 2 * (self.s + 2)
        return 4 * count * (1 + spread) * gap / (lr * steps)

    def _check(self, gap: float, lr: float, steps: int, noise: float, batch: int, limit: float) -> None:
        _positive(lr=lr, steps=steps, batch=batch)
        _not_negative(gap=gap, noise=noise)
        if lr > limit * (1 + 1e-9):
            raise ZeroBlockError(f"the bound needs lr ≤ {limit:.3g}, got {lr:g}")


@dataclasses.dataclass(frozen=True)
class Stability:
    """Theorem 3.10: how far apart two runs end if their data sets differ in one example.

    Losses lie in [0, 1], are G-Lipschitz and L-smooth, α_t ≤ C/t, and a step uses one example.

    Args:
        smoothness: L.
        lipschitz: G.
        s: srank(M_t) ≤ s.
        rho_max: ρmax.
        examples: n.
        rate: C.
    """

    smoothness: float
    lipschitz: float
    s: float
    rho_max: float
    examples: int
    rate: float

    def __post_init__(self) -> None:
        _positive(L=self.smoothness, G=self.lipschitz, s=self.s, n=self.examples, C=self.rate)
        _not_negative(rho_max=self.rho_max)

    @property
    def q(self) -> float:
        """q = CL√s."""
        return self.rate * self.smoothness * math.sqrt(self.s)

    @property
    def max_smoothing(self) -> float:
        """μ ≤ 1 / (nL(ρmax + s·exp(-s/2)))."""
        return 1 / (self.examples * self.smoothness * (self.rho_max + self.s * math.exp(-self.s / 2)))

    def bound(self, steps: int, eps: float) -> float:
        """ε_stab ≤ min over t₀ in [1, T] of t₀/n + GD[(T/t₀)^q - 1], D = (√3 + 4G)/(nL).

        Where the unconstrained minimum lies inside, this is the paper's
        (q+1)/(n·q^{q/(1+q)})·(G(√3+4G)/L)^{1/(1+q)}·T^{q/(1+q)} - G(√3+4G)/(nL).
        """
        _positive(steps=steps, eps=eps)
        if eps > self.max_smoothing * (1 + 1e-9):
            raise ZeroBlockError(f"Theorem 3.10 needs eps ≤ {self.max_smoothing:.3g}, got {eps:g}")
        n, g, q = self.examples, self.lipschitz, self.q
        growth = g * (math.sqrt(3) + 4 * g) / (n * self.smoothness)  # GD
        best = min(max((n * q * growth * steps**q) ** (1 / (1 + q)), 1.0), float(steps))
        return float(best / n + growth * ((steps / best) ** q - 1))


Constant = Literal["published", "valid"]


@dataclasses.dataclass(frozen=True)
class Tail:
    """Proposition 3.6: upper bounds of P(ρ ≥ E[ρ] + Δ), for a given H and s.

    Args:
        hessian: H.
        s: coordinates of M.
    """

    hessian: Hessian
    s: int

    def __post_init__(self) -> None:
        expected(self.hessian, self.s)

    def threshold(self, excess: float) -> float:
        """ρ̂ = E[ρ] + Δ."""
        _positive(excess=excess)
        return expected(self.hessian, self.s) + excess

    def low_rank(self, excess: float, constant: Constant = "valid") -> float:
        """exp(-c₁·dΔ²/s) with a constant that holds, or the published one.

        valid: c₁ = (d-2)/(8d) without the factor 2, min(s, d-s) instead of s.  This is concentration on SO(d), whose
        Ricci curvature is (d-2)/4, for ρ - s/2 = Tr Uᵀ(H/λmax - I/2)U, which is √s-Lipschitz in U.

        published: 2·exp(-c₁·dΔ²/s) with the constant of the proof, c₁ = 1/(8λmax²).  ρ does not change when H is scaled
        but that bound does: it holds for λmax ≥ 1, as in the paper's experiments, and is violated when H is scaled down
        (``lab bounds``).  The proposition itself promises only some constant.
        """
        _positive(excess=excess)
        d = self.hessian.dim
        if constant == "published":
            return min(1.0, 2 * math.exp(-d * excess**2 / (8 * self.s * self.hessian.top**2)))
        smaller = min(self.s, d - self.s)  # the complement of a Haar subspace is Haar, too
        return math.exp(-(d - 2) * excess**2 / (8 * smaller)) if smaller else 0.0

    def sparse(self, excess: float) -> float:
        """c₂·rs/(dΔ²), c₂ = 1 - s/d, r = intdim(H): Chebyshev for independent coordinates."""
        _positive(excess=excess)
        p = self.s / self.hessian.dim
        return min(1.0, (1 - p) * p * self.hessian.intdim / excess**2)

    def block_sparse(self, excess: float) -> float:
        """k(ρ̂)·s/d, exactly: the share of blocks with ρ_B ≥ ρ̂."""
        values = block_values(self.hessian, self.s)
        return float((values >= self.threshold(excess) - 1e-12).double().mean())
