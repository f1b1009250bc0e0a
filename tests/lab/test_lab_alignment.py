"""ρ: its closed forms, its range, its draws, and the M that the optimizer really uses."""

from __future__ import annotations

import math
import time

import pytest
import torch
from scipy import stats
from specimen import current_alignment

from zeroblock.errors import ZeroBlockError
from zeroblock.lab import alignment as a
from zeroblock.lab import bounds
from zeroblock.lab.descent import start
from zeroblock.lab.projection import THREE, Controlled, orthonormalised
from zeroblock.lab.quadratic import hessian, heterogeneous

H = heterogeneous(128, 4, 8, seed=2)


@pytest.mark.parametrize("name", a.ENSEMBLES)
@pytest.mark.parametrize("s", [8, 16, 32])
def test_mean_and_variance_have_their_closed_forms(name: str, s: int) -> None:
    ensemble = a.ENSEMBLES[name]
    rho = ensemble.sample(H, s, 4000, seed=s)
    moments = ensemble.moments(H, s)
    assert moments.mean == pytest.approx(s * H.trace / (128 * H.top))
    error = math.sqrt(moments.variance / len(rho))
    assert abs(float(rho.mean()) - moments.mean) < 4.5 * error
    kurtosis = float(((rho - rho.mean()) ** 4).mean() / rho.var() ** 2)
    assert float(rho.var()) == pytest.approx(moments.variance, rel=4.5 * math.sqrt((kurtosis - 1) / len(rho)) + 1e-9)
    assert abs(float(rho.mean()) - 1.1 * moments.mean) > 4.5 * error or name == "block-sparse"  # the test can fail


@pytest.mark.parametrize("name", ["low-rank", "sparse", "block-sparse"])
def test_alignment_lies_between_zero_and_the_smaller_of_r_and_s(name: str) -> None:
    for h in (H, hessian(128, 8, (3.0,))):
        for s in (1, 4, 32):
            rho = a.ENSEMBLES[name].sample(h, s, 500)
            assert float(rho.min()) >= 0
            assert float(rho.max()) <= min(h.intdim, h.rank, s) + 1e-4


def test_a_bernoulli_mask_can_exceed_s() -> None:
    flat = hessian(64, 64, (1.0,))
    rho = a.ENSEMBLES["sparse (Bernoulli)"].sample(flat, 4, 2000)
    assert float(rho.max()) > float(a.ENSEMBLES["sparse"].sample(flat, 4, 2000).max())


def test_block_sparse_spreads_wider_than_the_other_two() -> None:
    for rank in (4, 16):
        h = heterogeneous(256, rank, 16, seed=0)
        for s in (16, 32, 64):
            std = {n: float(e.sample(h, s, 1000).std()) for n, e in a.ENSEMBLES.items()}
            assert std["block-sparse"] > 2 * std["sparse"] > 2 * std["low-rank"]


def test_fast_draws_are_distributed_as_explicit_projections() -> None:
    h = heterogeneous(32, 2, 4, seed=5)
    full = torch.block_diag(*h.blocks)
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(1500, 32, 5, dtype=torch.float64, generator=generator)
    slow = [bounds.rho(u @ u.T, full) for u in orthonormalised(x)]
    fast = a.ENSEMBLES["low-rank"].sample(h, 5, 1500, seed=1)
    assert stats.ks_2samp(slow, fast.numpy()).pvalue > 1e-3
    assert stats.ks_2samp([1.05 * v for v in slow], fast.numpy()).pvalue < 1e-3


@pytest.mark.parametrize("kind", THREE)
def test_the_optimizer_uses_the_projection_it_names(kind) -> None:
    """ρ_t read off an optimizer's own bases has the closed form's mean."""
    h, s = heterogeneous(64, 4, 4, seed=1), 16
    optimizer = kind(s).optimizer(h, start(64, 0), 0.0, 1e-4, 0)
    rhos = []
    for _ in range(300):
        rhos.append(current_alignment(optimizer, h))
        optimizer.step(optimizer.model)
    name = {"sparse": "sparse (Bernoulli)"}.get(kind.label, kind.label)
    moments = a.ENSEMBLES[name].moments(h, s)
    assert abs(sum(rhos) / 300 - moments.mean) < 4.5 * math.sqrt(moments.variance / 300)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0])
def test_controlled_alignment_has_its_closed_form(gamma: float) -> None:
    h = hessian(64, 16)
    optimizer = Controlled(16, gamma).optimizer(h, start(64, 0), 0.0, 1e-4, 3)
    chosen = optimizer.subspace.chosen
    assert chosen == math.ceil(16 * gamma)
    rhos = []
    for _ in range(200):
        rhos.append(current_alignment(optimizer, h))
        optimizer.step(optimizer.model)
    values = torch.tensor(rhos)
    expected = a.expected_controlled(h, 16, chosen)
    assert abs(float(values.mean()) - expected) < 4.5 * float(values.std()) / math.sqrt(200) + 1e-6
    if gamma == 0:
        assert expected == pytest.approx(a.expected(h, 16))
    if gamma == 1:
        assert expected == pytest.approx(h.intdim)


def test_haar_columns_are_orthonormal_and_uniform() -> None:
    x = torch.randn(2000, 6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u = orthonormalised(x)
    assert torch.allclose(u.mT @ u, torch.eye(2, dtype=torch.float64).expand(2000, 2, 2))
    # the first entry of a uniform unit vector of six dimensions: its square is Beta(1/2, 5/2)
    assert stats.kstest((u[:, 0, 0] ** 2).numpy(), stats.beta(0.5, 2.5).cdf).pvalue > 1e-3
    assert abs(float((u[:, 0, 0] > 0).double().mean()) - 0.5) < 0.05  # signs too: LAPACK's QR would give one


def test_a_thousand_draws_at_full_size_take_seconds() -> None:
    h = heterogeneous(1024, 16, 16)
    begun = time.process_time()  # not the wall clock, which a busy machine slows down
    for name in a.ENSEMBLES:
        a.ENSEMBLES[name].sample(h, 256, 1000)
    assert time.process_time() - begun < 60  # 4 s measured


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ZeroBlockError, match="s must be"):
        a.expected(H, 129)
    with pytest.raises(ZeroBlockError, match="do not divide"):
        a.block_values(H, 24)
    with pytest.raises(ZeroBlockError, match="draws"):
        a.ENSEMBLES["sparse"].sample(H, 8, 0)
    with pytest.raises(ZeroBlockError, match="gamma"):
        Controlled(8, 1.5).optimizer(hessian(32, 8), start(32, 0), 0.1, 1e-3, 0)
    with pytest.raises(ZeroBlockError, match="eigenvectors"):
        Controlled(16, 1.0).optimizer(hessian(32, 8), start(32, 0), 0.1, 1e-3, 0)
    with pytest.raises(ZeroBlockError, match="does not fit"):
        THREE[0](33).optimizer(hessian(32, 8), start(32, 0), 0.1, 1e-3, 0)
