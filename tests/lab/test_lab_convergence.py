"""Descent on quadratics: by the library's optimizer, faster with more alignment, in proportion to 1/ρ̄."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import zeroblock
from zeroblock.errors import ZeroBlockError
from zeroblock.lab.convergence import Convergence, Fit
from zeroblock.lab.curves import Curves
from zeroblock.lab.descent import descend, start
from zeroblock.lab.projection import THREE, Controlled, Haar, LowRank, Orthonormal
from zeroblock.lab.quadratic import Quadratic, hessian, heterogeneous
from zeroblock.lab.runner import Runner
from zeroblock.noise import Distribution, Key, Rounding


@pytest.fixture(scope="module")
def frames():
    study = Convergence(64, 16, 16, 2e-3, short=100, long=1500, seeds=2, left=(0.0, 0.4, 1.0),
                        gammas=(0.0, 0.2, 0.4, 0.7, 1.0))  # fmt: skip
    return study.measure(Runner())


def test_higher_gamma_is_more_aligned_and_faster(frames) -> None:
    mean = frames["convergence"].groupby("gamma").mean(numeric_only=True)
    assert mean.mean_rho.is_monotonic_increasing
    assert mean.iterations.is_monotonic_decreasing
    last = frames["convergence_curves"].query("step == 100").groupby("gamma").loss.mean()
    assert last.is_monotonic_decreasing


def test_iterations_times_alignment_is_constant(frames) -> None:
    """Within ±20 % of its mean over γ, while ρ̄ itself spans a factor of four."""
    mean = frames["convergence"].groupby("gamma").mean(numeric_only=True)
    product = mean.iterations * mean.mean_rho
    assert float(product.max() / product.mean()) < 1.2
    assert float(product.min() / product.mean()) > 0.8
    assert float(mean.mean_rho.max() / mean.mean_rho.min()) > 3.5
    through = frames["convergence_fit"].set_index("line").loc["through the origin"]
    assert through.r2 > 0.95


def test_a_run_is_the_optimizers() -> None:
    """The lab's loss is what ``ZeroOrder`` gives on the same module, step for step."""
    h = hessian(32, 8)
    trace = descend(h, LowRank(8), lr=1e-2, eps=1e-4, steps=20, seed=4)
    model = Quadratic(h, start(32, 4))
    optimizer = zeroblock.ZeroOrder(
        model, 1e-2, partition=zeroblock.whole, schedule=zeroblock.Ascending(), subspace=Haar(8),
        estimator=zeroblock.TwoSided(1e-4), seed=4,
    )  # fmt: skip
    for t in range(20):
        assert float(model().detach()) == trace.loss[t]
        optimizer.step(model)
    assert float(model().detach()) == trace.loss[20]
    assert trace.loss[20] < trace.loss[0]


@pytest.mark.parametrize("kind", THREE)
def test_three_projections_descend_alike(kind) -> None:
    h = heterogeneous(128, 4, 8, seed=0)
    reference = descend(h, THREE[0](32), lr=5e-4, eps=1e-4, steps=300, seed=1, origin=0).loss
    loss = descend(h, kind(32), lr=5e-4, eps=1e-4, steps=300, seed=0, origin=0).loss
    assert loss[-1] < 0.5 * loss[0]
    assert loss[-1] == pytest.approx(reference[-1], rel=0.5)


def test_the_basis_keeps_the_contract_of_the_core() -> None:
    """What ``perturbed`` measures along is what ``add_``, ``coords`` and ``lift_`` move along."""
    param = torch.randn(12, dtype=torch.float64)
    key = Key(3, 5)
    basis = Haar(4).basis(param, key, 0, None, Distribution.NORMAL)
    assert isinstance(basis, Orthonormal)
    assert basis.size == 4
    z = basis.coords(param, key, slice(0, 4))
    direction = basis.factor @ z.double()
    assert torch.allclose(basis.perturbed(param, key, 0.5, Rounding.NEAREST), param + 0.5 * direction)
    moved = param.clone()
    basis.add_(moved, key, (0.25, -1.0), 0.9, Rounding.NEAREST)
    other = basis.factor @ basis.coords(param, key.to(probe=1), slice(0, 4)).double()
    assert torch.allclose(moved, 0.9 * param + 0.25 * direction - other)
    lifted = param.clone()
    basis.lift_(lifted, z, slice(0, 4), -2.0, key, 1.0, Rounding.NEAREST)
    assert torch.allclose(lifted, param - 2 * direction)
    assert torch.allclose(basis.transport(z, basis), z, atol=1e-6)
    assert not torch.equal(basis.factor, Haar(4).basis(param, Key(3, 6), 0, None, Distribution.NORMAL).factor)


def test_momentum_runs_over_a_haar_basis() -> None:
    h = hessian(32, 8)
    model = Quadratic(h, start(32, 0))
    optimizer = zeroblock.ZeroOrder(
        model, 1e-2, partition=zeroblock.whole, subspace=Haar(8), interval=5, rule=zeroblock.Momentum(0.5),
        estimator=zeroblock.TwoSided(1e-4),
    )  # fmt: skip
    before = float(model().detach())
    for _ in range(60):
        optimizer.step(model)
    assert float(model().detach()) < before


def test_a_fit_recovers_its_line() -> None:
    x = np.linspace(0.1, 1, 8)
    fit = Fit.of(x, 50 * x)
    assert fit.slope == pytest.approx(50)
    assert fit.r2 == pytest.approx(1)
    shifted = Fit.of(x, 50 * x + 30)
    assert shifted.free[:2] == pytest.approx((50, 30))
    assert shifted.r2 < 0.9
    with pytest.raises(ZeroBlockError, match="three"):
        Fit.of([1, 1, 1], [1, 2, 3])


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ZeroBlockError, match="start with 0"):
        Convergence(gammas=(0.5, 1.0), left=(0.5,)).measure(Runner())
    with pytest.raises(ZeroBlockError, match="at least 1"):
        descend(hessian(8, 4), Controlled(4, 0.5), lr=0.1, eps=1e-3, steps=0, seed=0)


def test_curves_report_equal_alignment() -> None:
    frame = Curves(64, 4, 4, (16,), 1e-3, steps=100, seeds=2).measure(Runner())["curves"]
    rho = frame.groupby("projection").mean_rho.mean()
    assert len(rho) == 3
    assert float(rho.max() / rho.min()) < 1.6
