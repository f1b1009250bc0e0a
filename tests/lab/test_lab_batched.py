"""Batches of runs: a step is the optimizer's, directions are distributed as its own, schedules visit what they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from zeroblock.errors import ZeroBlockError
from zeroblock.lab import batched as b
from zeroblock.lab.alignment import expected_controlled
from zeroblock.lab.projection import THREE, Controlled, orthonormalised
from zeroblock.lab.quadratic import hessian, heterogeneous
from zeroblock.lab.runner import Runner
from zeroblock.lab.schedules import Schedules, directions


class Replayed:
    """Directions recorded from another run."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self.rows = rows

    def draw(self, seeds: int, step: int, generator: torch.Generator) -> torch.Tensor:
        return self.rows[step].unsqueeze(0)


@pytest.mark.parametrize("kind", THREE)
def test_a_batched_step_is_the_optimizers(kind) -> None:
    """The same start and the same directions give the losses of ``ZeroOrder``, also for a second learning rate."""
    h, lr = heterogeneous(32, 4, 4, seed=1), 2e-3
    start = torch.randn(1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))[0]
    optimizer = kind(8).optimizer(h, start, lr, 1e-4, 0)
    model = optimizer.model
    losses, rows = [float(model().detach())], []
    for _ in range(12):
        before = model.point().detach().clone()
        optimizer.step(model)
        rows.append((before - model.point().detach()) / (lr * optimizer.record.coeffs[0]))
        losses.append(float(model().detach()))
    runs = b.descend_all(h, Replayed(rows), lrs=(lr, 0.0), steps=12, seeds=1, seed=5, points=12, gradients=True)
    assert runs.loss[0, 0] == pytest.approx(np.array(losses) / losses[0], rel=1e-6)
    assert runs.loss[1, 0] == pytest.approx(np.ones(13))
    assert float(runs.gap[0, 0]) == pytest.approx(losses[0] - losses[-1], rel=1e-6)
    assert float(runs.gradient[1, 0]) == pytest.approx(float((h @ start).square().sum()))


def test_haar_directions_are_those_of_explicit_subspaces() -> None:
    generator = torch.Generator().manual_seed(0)
    fast = b.haar(4000, 6, 2, generator)
    u = orthonormalised(torch.randn(4000, 6, 2, dtype=torch.float64, generator=generator))
    slow = (u @ torch.randn(4000, 2, 1, dtype=torch.float64, generator=generator)).squeeze(2)
    assert stats.ks_2samp(fast[:, 0].numpy(), slow[:, 0].numpy()).pvalue > 1e-3
    assert stats.ks_2samp(fast.norm(dim=1).numpy(), slow.norm(dim=1).numpy()).pvalue > 1e-3
    assert stats.ks_2samp(b.haar(4000, 6, 3, generator)[:, 0].numpy(), slow[:, 0].numpy()).pvalue < 1e-3


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_aligned_directions_have_the_alignment_of_their_optimizer(gamma: float) -> None:
    """E[vᵀHv]/λmax is E[ρ], and the fourth moment agrees with directions that ``ZeroOrder`` took."""
    h, s = hessian(48, 12), 12
    chosen = math.ceil(s * gamma)
    v = b.AlignedDirections(h.vectors[0], 12, s, chosen).draw(6000, 0, torch.Generator().manual_seed(1))
    rho = (v * (h @ v.T.contiguous()).T).sum(1) / h.top
    error = float(rho.std()) / math.sqrt(len(rho))
    assert abs(float(rho.mean()) - expected_controlled(h, s, chosen)) < 4.5 * error
    assert abs(float(v.square().sum(1).mean()) - s) < 4.5 * math.sqrt(2 * s / 6000)
    optimizer = Controlled(s, gamma).optimizer(h, torch.ones(48), 1e-3, 1e-4, 0)
    own = []
    for _ in range(300):
        before = optimizer.model.point().detach().clone()
        optimizer.step(optimizer.model)
        step = (before - optimizer.model.point().detach()) / (1e-3 * optimizer.record.coeffs[0])
        own.append(float(step @ (h @ step)) / h.top)
    assert stats.ks_2samp(own, rho.numpy()).pvalue > 1e-3


def test_sparse_directions_keep_their_coordinates() -> None:
    generator = torch.Generator().manual_seed(2)
    assert bool(((b.SparseDirections(40, 7, exact=True).draw(50, 0, generator) != 0).sum(1) == 7).all())
    kept = (b.SparseDirections(40, 7).draw(5000, 0, generator) != 0).sum(1).double()
    assert abs(float(kept.mean()) - 7) < 4.5 * math.sqrt(40 * 0.175 * 0.825 / 5000)
    assert float(kept.std()) > 1


def test_blocks_are_visited_as_the_order_says() -> None:
    generator = torch.Generator().manual_seed(3)
    shuffled = b.BlockDirections(12, 3, "shuffled")
    visits = torch.stack([shuffled.pick(50, t, generator) for t in range(8)])
    for cycle in (visits[:4], visits[4:]):
        assert bool((cycle.sort(0).values == torch.arange(4).unsqueeze(1)).all())
    assert not torch.equal(visits[:4], visits[4:])
    ascending = b.BlockDirections(12, 3, "ascending")
    assert [int(ascending.pick(1, t, generator)) for t in range(5)] == [0, 1, 2, 3, 0]
    only = b.BlockDirections(12, 3, "weighted", (0.0, 1.0, 0.0, 0.0), scales=(1.0, 2.0, 1.0, 1.0))
    v = only.draw(4000, 0, generator)
    assert bool((v[:, :3] == 0).all())
    assert float(v[:, 3:6].square().mean()) == pytest.approx(4, rel=0.1)  # a factor of 2 is a learning rate of 4


def test_targets_divergence_and_ends_are_reported() -> None:
    h = hessian(32, 8)
    runs = b.descend_all(h, b.HaarDirections(32, 8), lrs=(1e-2, 10.0), steps=2000, seeds=3, target=0.1, points=400)
    assert bool((runs.reached[0] > 0).all())
    assert bool(np.isnan(runs.reached[1]).all())
    assert bool(np.isinf(runs.loss[1, :, 4]).all())
    assert bool(np.isnan(runs.loss[:, :, -1]).all())  # all runs had ended
    with pytest.raises(ZeroBlockError, match="at least one"):
        b.descend_all(h, b.HaarDirections(32, 8), lrs=(), steps=5, seeds=1)
    with pytest.raises(ZeroBlockError, match="do not divide"):
        b.BlockDirections(10, 3)
    with pytest.raises(ZeroBlockError, match="unknown order"):
        b.BlockDirections(9, 3, "random")


@pytest.fixture(scope="module")
def schedules():
    study = Schedules(256, 4, 16, 16, (4e-4, 1e-3), 600, seeds=4, adaptive_lrs=(1e-3,), adaptive_seeds=1)
    return study.measure(Runner())["schedules"].groupby("schedule").loss.min()


def test_the_best_block_alone_leaves_the_loss_of_the_others(schedules) -> None:
    assert schedules["best"] > 0.7
    assert schedules["uniform"] < 0.3
    assert schedules["own_lr"] < 0.5 * schedules["uniform"]


def test_a_learning_rate_per_block_is_one_over_its_own_curvature() -> None:
    h = heterogeneous(64, 4, 4, seed=2)
    scales = torch.tensor(directions("own_lr", h, 16).scales).double() ** 2
    own = 1 / (h.spectra.sum(1) + 2 * h.spectra.max(1).values)
    assert torch.allclose(scales, own / own.min())
