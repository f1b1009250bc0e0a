"""Sixteen bits: weights that come back, and updates that are not lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeroblock as zb
from toy import same, snapshot

SIXTEEN = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


class Weights(nn.Module):
    def __init__(self, n: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter((torch.randn(n, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype))


@SIXTEEN
def test_2000_steps_at_rate_zero(dtype: torch.dtype) -> None:
    """Ours stays where it was to the bit; restoring by subtraction drifts, as MeZO's does."""
    ours, mezo = Weights(3000, dtype), Weights(3000, dtype)
    start = snapshot(ours)
    steady, drifting = zb.mezo(ours, 0.0), zb.mezo(mezo, 0.0, as_published=True)
    for _ in range(2000):
        steady.step(lambda: ours.w.float().square().sum())
        drifting.step(lambda: mezo.w.float().square().sum())
    assert same(snapshot(ours), start)
    drift = (mezo.w.float() - start["w"].float()).square().mean().sqrt() / 0.02
    moved = (mezo.w != start["w"]).float().mean()
    print(f"{dtype}: after 2,000 steps MeZO's way moved {moved:.1%} of the weights, rms {drift:.2%} of their std")
    assert moved > 0.4
    assert drift > (5e-3 if dtype == torch.float16 else 5e-2)


@SIXTEEN
def test_stochastic_rounding_tracks_fp32_where_nearest_stalls(dtype: torch.dtype) -> None:
    """A constant slope, steps far below one unit in the last place."""
    n, steps = 2000, 600
    lr = 2e-8 if dtype == torch.float16 else 2e-7  # either way 0.07 units a step for weights of 0.02
    slope = torch.ones(n)

    def run(dtype: torch.dtype, rounding: zb.Rounding) -> torch.Tensor:
        model = Weights(n, dtype)
        start = model.w.detach().double().clone()
        optimizer = zb.mezo(model, lr, rounding=rounding)
        records = [zb.Record(t, 0, coeffs[t], lr, (), 0.0) for t in range(steps)]
        zb.replay(optimizer, records)
        return model.w.detach().double() - start

    # coefficients of the linear objective, measured once in fp64, so that all three take the same steps
    reference = Weights(n, torch.float64)
    measure = zb.mezo(reference, 0.0)
    coeffs = []
    for _ in range(steps):
        measure.step(lambda: (reference.w * slope).sum())
        coeffs.append(measure.record.coeffs)

    exact = run(torch.float32, zb.Rounding.NEAREST)
    stochastic = run(dtype, zb.Rounding.STOCHASTIC)
    nearest = run(dtype, zb.Rounding.NEAREST)
    assert float(exact.mean()) < -5e-6  # downhill
    progress = [float(x.mean() / exact.mean()) for x in (stochastic, nearest)]
    assert progress[0] == pytest.approx(1.0, abs=0.25), progress
    assert abs(progress[1]) < 0.5, progress


@SIXTEEN
def test_a_perturbation_below_the_grid_is_still_measured(dtype: torch.dtype) -> None:
    """Weights near 1 have a grid ten times eps: flat when rounded to nearest, noisy but right when stochastic."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Module()
    model.w = nn.Parameter(torch.rand(4000, generator=generator).add(1.0).to(dtype))
    slope = torch.randn(4000, generator=generator)
    eps = 1e-4 if dtype == torch.float16 else 8e-4

    def cosine(rounding: zb.Rounding) -> float:
        """Between the mean of c·u over 300 directions and the slope."""
        optimizer = zb.mezo(model, 0.0, eps=eps, rounding=rounding)
        total = torch.zeros(4000)
        for step in range(300):
            optimizer.step(lambda: (model.w.float() * slope).sum())
            total += optimizer.record.coeffs[0] * zb.normal(zb.Draw(zb.Key(0, step)), (4000,))
        return float(nn.functional.cosine_similarity(total, slope, dim=0))

    # 300 exact directions in 4,000 dimensions reach √(300/4300); rounding multiplies the variance of c by E|u|·unit/eps
    ideal = (300 / 4300) ** 0.5 / (0.8 * 9.77) ** 0.5
    assert cosine(zb.Rounding.STOCHASTIC) == pytest.approx(ideal, abs=3 / 4000**0.5)
    assert ideal > 5 / 4000**0.5
    assert abs(cosine(zb.Rounding.NEAREST)) < 3 / 4000**0.5
