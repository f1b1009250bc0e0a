"""The random quadratic: its spectrum, its algebra, its module."""

from __future__ import annotations

import pytest
import torch

from zeroblock.errors import ZeroBlockError
from zeroblock.lab.descent import start
from zeroblock.lab.quadratic import REFERENCES, Hessian, Quadratic, hessian, heterogeneous


def dense(h: Hessian) -> torch.Tensor:
    return torch.block_diag(*h.blocks)


def test_linear_decay_to_a_tenth() -> None:
    h = hessian(32, 5, (10.0, 40.0))
    values = torch.linalg.eigvalsh(dense(h)).flip(0)
    expected = torch.cat([torch.linspace(t, 0.1 * t, 5, dtype=torch.float64) for t in (10, 40)]).sort(descending=True)
    assert torch.allclose(values[:10], expected.values)
    assert values[10:].abs().max() < 1e-12
    assert h.rank == 10
    assert h.top == 40


@pytest.mark.parametrize("decay", [False, True])
def test_heterogeneous_spectra_lie_around_the_references(decay: bool) -> None:
    h = heterogeneous(128, 4, 16, decay=decay, seed=3)
    tops = h.spectra[:, 0] if decay else h.spectra[:, :4]
    near = (tops.unsqueeze(-1) - torch.tensor(REFERENCES)).abs().min(-1).values
    assert near.max() <= 2
    assert len({round(float(t) / 30) for t in h.spectra[:, 0]}) > 1
    assert bool((h.spectra[:, 4:] == 0).all())
    if decay:
        assert torch.allclose(h.spectra[:, 3], 0.1 * h.spectra[:, 0])


def test_products_and_summaries_are_those_of_the_dense_matrix() -> None:
    h = heterogeneous(64, 3, 8, seed=1)
    full = dense(h)
    x = torch.randn(64, 5, dtype=torch.float64)
    assert torch.allclose(h @ x, full @ x)
    assert torch.allclose(h @ x[:, 0], full @ x[:, 0])
    assert h.trace == pytest.approx(float(full.trace()))
    assert torch.allclose(h.diagonal, full.diagonal())
    basis = h.range()
    assert basis.shape == (64, 24)
    assert torch.allclose(basis.T @ basis, torch.eye(24, dtype=torch.float64))
    assert torch.allclose(basis @ (basis.T @ full), full)


@pytest.mark.parametrize("size", [None, 4, 16])
def test_the_module_is_the_quadratic_however_it_is_cut(size: int | None) -> None:
    h, theta = hessian(32, 8), start(32, 0)
    model = Quadratic(h, theta, size)
    assert len(list(model.parameters())) == (1 if size is None else 32 // size)
    assert float(model()) == pytest.approx(float(theta @ dense(h) @ theta) / 2)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ZeroBlockError, match="do not divide"):
        hessian(10, 2, (1.0, 1.0, 1.0))
    with pytest.raises(ZeroBlockError, match="rank 9 does not fit"):
        hessian(8, 9)
    with pytest.raises(ZeroBlockError, match="shape"):
        Quadratic(hessian(8, 4), torch.zeros(9))
    with pytest.raises(ZeroBlockError, match="do not divide"):
        Quadratic(hessian(8, 4), torch.zeros(8), 3)
