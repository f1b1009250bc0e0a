"""Theorem 3.3 against runs: quadratics, linear and pseudo-Huber losses, and corrected bounds on random quadratics."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from pandas import DataFrame

from .alignment import ENSEMBLES, expected
from .batched import BlockDirections, Directions, HaarDirections, SparseDirections, descend_all, haar
from .bounds import Alignments, Rate
from .quadratic import hessian, heterogeneous


@dataclasses.dataclass(frozen=True)
class Setting:
    """A quadratic and a subspace; the step size is the largest that Theorem 3.3 allows for every draw of M."""

    dim: int = 256
    rank: int = 64
    s: int = 64
    steps: int = 2000


def _jackknife(top: np.ndarray, bottom: np.ndarray) -> tuple[float, float]:
    """The ratio of two means over runs, (n,) each, and its standard error."""
    n = len(top)
    left_out = (top.sum() - top) / (bottom.sum() - bottom)
    return float(top.sum() / bottom.sum()), float(math.sqrt((n - 1) / n * ((left_out - left_out.mean()) ** 2).sum()))


def against_bound(setting: Setting, seeds: int, points: int = 40) -> DataFrame:
    """(1/T)Σ‖∇L(θ_t)‖² and both bounds, means over ``seeds`` runs, for T up to ``steps``; with the ratio's error.

    H is diagonal here, because the Haar measure is the same in every basis.  ρ̄ is the expectation of ρ and ρmax the
    largest value that ρ can take, so the step size is allowed for every M that the run may draw.
    """
    h = hessian(setting.dim, setting.rank)
    largest = ENSEMBLES["low-rank"].largest(h, setting.s)
    rate = Rate(h.top, h.dim, setting.s, h.intdim, Alignments(expected(h, setting.s), largest))
    lr, eps = rate.max_step, rate.smoothing(setting.steps)
    generator = torch.Generator().manual_seed(setting.s)
    spectrum = h.spectra.reshape(-1)
    theta = torch.randn(seeds, h.dim, dtype=torch.float64, generator=generator)
    squares, losses = [], []
    for _ in range(setting.steps + 1):
        gradient = theta * spectrum
        squares.append(gradient.square().sum(1))
        losses.append((theta * gradient).sum(1) / 2)
        v = haar(seeds, h.dim, setting.s, generator)
        theta = theta - lr * (gradient * v).sum(1, keepdim=True) * v
    running = (torch.stack(squares).cumsum(0) / torch.arange(1, setting.steps + 2).unsqueeze(1)).numpy()
    loss = torch.stack(losses).numpy()
    rows = []
    for t in np.unique(np.geomspace(10, setting.steps, points).astype(int)):
        gap = float(max(0.0, (loss[0] - loss[t]).mean()))  # smoothing adds the same constant to both
        published = rate.published(gap=gap, lr=lr, steps=int(t), eps=eps)
        fixed = published - 8 * gap / (lr * t)
        ratio, error = _jackknife(running[t - 1], fixed + 8 * (loss[0] - loss[t]) / (lr * t))
        rows.append(
            {
                "s": setting.s, "d": setting.dim, "T": int(t), "lr": lr, "eps": eps, "seeds": seeds,
                "measured": running[t - 1].mean(),
                "measured_error": running[t - 1].std(ddof=1) / math.sqrt(seeds), "published": published,
                "corrected": rate.corrected(gap=gap, lr=lr, steps=int(t)), "ratio": ratio, "ratio_error": error,
            }
        )  # fmt: skip
    return DataFrame(rows)


def counterexamples(
    sizes: tuple[tuple[int, int], ...] = ((256, 8), (1024, 8), (4096, 8)), steps: int = 2000, seeds: int = 200
) -> DataFrame:
    """Measured / published for losses of bounded gradient, which meet every condition of Theorem 3.3.

    linear         L = Gx
    pseudo-Huber   L = G√(δ² + x²), which is bounded below too; ‖∇L‖ ≤ G
    fixed M        the linear loss, its gradient outside the range of an M that is never redrawn

    x is one coordinate of θ and H = (G/δ)·e₁e₁ᵀ, so r = 1 and ρ_t = ‖M_t e₁‖², which is Beta(s/2, (d-s)/2); given
    M_t, ⟨e₁, M_t u⟩ is normal with variance ρ_t.  The run is one-dimensional and exact.  G = 1000 and x₀ = δ = 1000, so
    L = 1; smoothing is neglected, since μ = 1/(L√(ρ̄dT)) is at most 10⁻⁵ of δ.
    """
    rows = []
    size = 1000.0
    for kind in ("linear", "pseudo-Huber", "fixed M"):
        for d, s in sizes:
            rng = np.random.default_rng(d + s)
            rho = rng.beta(s / 2, (d - s) / 2, (steps, seeds)) if kind != "fixed M" else np.zeros((steps, seeds))
            # a fixed M that misses the gradient has ρ = 0; the theorem's ρ̄ must be positive, so it gets the mean, s/d
            mean = rho.mean(0) if kind != "fixed M" else np.full(seeds, s / d)
            top = rho.max(0) if kind != "fixed M" else np.full(seeds, s / d)
            rates = [Rate(1.0, d, s, 1.0, Alignments(m, t)) for m, t in zip(mean, top, strict=True)]
            lr = np.array([rate.max_step for rate in rates])
            x = np.full(seeds, size)
            squares, start = np.zeros(seeds), _value(kind, x, size)
            for t in range(steps):
                slope = size * (x / np.hypot(size, x) if kind == "pseudo-Huber" else np.ones(seeds))
                squares += slope**2
                x = x - lr * slope * rho[t] * rng.standard_normal(seeds) ** 2
            gap = start - _value(kind, x, size)
            published = np.array(
                [
                    rate.published(gap=max(0.0, g), lr=a, steps=steps, eps=rate.smoothing(steps))
                    for rate, g, a in zip(rates, gap, lr, strict=True)
                ]
            )
            ratio, error = _jackknife(squares / steps, published)
            rows.append({"loss": kind, "d": d, "s": s, "d_over_s": d / s, "T": steps, "seeds": seeds, "ratio": ratio,
                         "ratio_error": error, "d_over_8s": d / (8 * s)})  # fmt: skip
    return DataFrame(rows)


def _value(kind: str, x: np.ndarray, size: float) -> np.ndarray:
    return np.asarray(size * (np.hypot(size, x) if kind == "pseudo-Huber" else x))


def corrected_on_random(count: int = 40, steps: int = 160, seeds: int = 32, seed: int = 0) -> DataFrame:
    """Measured / corrected bound on random quadratics, at the largest step size the bound allows.

    Each ensemble gets ``count`` quadratics, d = 64, with random rank, spectrum and s.  Four ensembles draw M
    independently; block descent in shuffled and in ascending cycles is compared with ``Rate.cyclic``, at cycle starts.
    """
    rows = []
    rng = np.random.default_rng(seed)
    d = 64
    for index in range(count):
        s = int(rng.choice([4, 8, 16, 32]))
        blocks = int(rng.choice([1, 4, 8]))
        h = heterogeneous(d, int(rng.integers(1, d // blocks + 1)), blocks, decay=bool(rng.integers(2)), seed=index)
        kinds: dict[str, Directions] = {
            "low-rank": HaarDirections(d, s), "sparse": SparseDirections(d, s, exact=True),
            "sparse (Bernoulli)": SparseDirections(d, s), "block-sparse": BlockDirections(d, s),
            "shuffled": BlockDirections(d, s, "shuffled"), "ascending": BlockDirections(d, s, "ascending"),
        }  # fmt: skip
        for name, directions in kinds.items():
            cycles = name in ("shuffled", "ascending")
            ensemble = ENSEMBLES["block-sparse" if cycles else name]
            rate = Rate(h.top, d, s, h.intdim, Alignments(expected(h, s), ensemble.largest(h, s)))
            lr, whole = rate.max_step_corrected, steps - steps % (d // s)
            runs = descend_all(
                h, directions, lrs=(lr,), steps=whole, seeds=seeds, seed=index, points=1, gradients=True,
                gradient_every=d // s if cycles else 1,
            )  # fmt: skip
            unit = (rate.cyclic if cycles else rate.corrected)(gap=1.0, lr=lr, steps=whole)
            ratio, error = _jackknife(runs.gradient[0], unit * runs.gap[0])
            rows.append({"ensemble": name, "quadratic": index, "s": s, "rank": h.rank, "T": whole, "ratio": ratio,
                         "ratio_error": error, "z": (ratio - 1) / error})  # fmt: skip
    return DataFrame(rows)
