"""Measures of a model: Hessian-vector products and forward differences, against an explicit Hessian."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zeroblock
from toy import Tiny, same, snapshot
from zeroblock.errors import ZeroBlockError
from zeroblock.lab import model as m

TOKENS = torch.arange(7)
BATCHES = ((TOKENS, TOKENS.roll(-1)), (TOKENS.flip(0), TOKENS.roll(-2)))


def loss(tiny: nn.Module, batch) -> torch.Tensor:
    return nn.functional.cross_entropy(tiny(batch[0]), batch[1])


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return Tiny(width=4, depth=2, dtype=torch.float64)


@pytest.fixture(scope="module")
def closures(tiny: Tiny):
    return [lambda batch=batch: loss(tiny, batch) for batch in BATCHES]


@pytest.fixture(scope="module")
def truth(tiny: Tiny):
    """Hessian, mean gradient and the batches' gradients of every block, by autograd over a flat vector."""
    named, found = dict(tiny.named_parameters()), []
    for block in zeroblock.layers(tiny):
        flat = torch.cat([named[n].detach().reshape(-1) for n in block.params])

        def value(v: torch.Tensor, batch, block=block) -> torch.Tensor:
            pieces = v.split([named[n].numel() for n in block.params])
            weights = {n: p.view(named[n].shape) for n, p in zip(block.params, pieces, strict=True)}
            return nn.functional.cross_entropy(functional_call(tiny, weights, (batch[0],)), batch[1])

        hessian = sum(
            torch.autograd.functional.hessian(lambda v, b=b, f=value: f(v, b), flat) for b in BATCHES
        ) / 2  # fmt: skip
        gradients = [torch.func.grad(value)(flat, b) for b in BATCHES]
        found.append((hessian, gradients))
    return found


@pytest.fixture(scope="module")
def curvature(tiny: Tiny, closures) -> m.Curvature:
    return m.Curvature.of(tiny, closures)


@pytest.fixture(scope="module")
def backward(tiny: Tiny, curvature: m.Curvature):
    return list(m.backward(tiny, curvature, probes=60, iterations=25))


@pytest.fixture(scope="module")
def forward(tiny: Tiny, closures):
    return list(m.forward(tiny, closures, probes=60, sketch=12, eps=1e-3))


def test_products_are_those_of_the_explicit_hessian(tiny: Tiny, curvature: m.Curvature, truth) -> None:
    for block, (hessian, _) in zip(zeroblock.layers(tiny), truth, strict=True):
        part = curvature.part(block.params)
        vectors = [torch.randn(3, *p.shape, dtype=p.dtype) for p in part.params.values()]
        expected = torch.cat([v.flatten(1) for v in vectors], 1) @ hessian
        together = part.together(vectors)
        assert torch.allclose(torch.cat([x.flatten(1) for x in together], 1), expected, atol=1e-10)
        found = torch.cat([x.reshape(-1) for x in part @ [v[0] for v in vectors]])
        assert torch.allclose(found, expected[0], atol=1e-10)


class Stubborn(torch.autograd.Function):
    """x², with a derivative that vmap cannot batch."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> torch.Tensor:
        assert g.detach().item() < math.inf
        return 2 * g * ctx.saved_tensors[0]


def test_products_that_cannot_be_batched_run_one_by_one() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.tensor(1.5, dtype=torch.float64))})
    found = m.Curvature.of(model, [lambda: Stubborn.apply(model["w"]) * model["w"]])
    assert found.together([torch.tensor([1.0, 2.0], dtype=torch.float64)])[0].tolist() == pytest.approx([9.0, 18.0])


def test_backward_measures_agree_with_the_explicit_hessian(backward, truth) -> None:
    for block, (hessian, gradients) in zip(backward, truth, strict=True):
        assert block.size == len(hessian)
        assert abs(block.trace.value - float(hessian.trace())) < 4.5 * block.trace.error
        assert block.top.value == pytest.approx(float(torch.linalg.eigvalsh(hessian)[-1]), rel=1e-6)
        assert block.gradient.value == pytest.approx(float((sum(gradients) / 2).square().sum()))
        assert block.variance.value == pytest.approx(sum(float(g.square().sum()) for g in gradients) / 2)


def test_an_unfinished_lanczos_says_how_far_off_it_is(tiny: Tiny, curvature: m.Curvature, truth) -> None:
    values = torch.linalg.eigvalsh(truth[1][0])
    rough = list(m.backward(tiny, curvature, probes=2, iterations=3))[1].top
    assert float((values - rough.value).abs().min()) <= rough.error + 1e-9
    assert rough.value <= float(values[-1]) + 1e-9


def test_forward_and_backward_agree(forward, backward) -> None:
    for a, b in zip(forward, backward, strict=True):
        assert a.name == b.name
        assert a.size == b.size
        # the same z, so the traces differ by the error of the differences alone
        assert a.trace.value == pytest.approx(b.trace.value, rel=1e-3, abs=1e-3)
        assert a.trace.error == pytest.approx(b.trace.error, rel=1e-2)
        chance = 4.5 * math.sqrt(2 / 60)  # of a mean of 60 squares
        assert a.gradient.value == pytest.approx(b.gradient.value, rel=chance)
        assert a.variance.value == pytest.approx(b.variance.value, rel=chance)
        if math.isfinite(a.top.error):
            assert abs(a.top.value - b.top.value) < 3 * a.top.error


def test_the_whole_models_top_is_at_least_every_blocks(tiny: Tiny, curvature: m.Curvature, backward) -> None:
    whole = m.top(tiny, curvature, iterations=25)
    assert all(block.top.value <= whole.value + 1e-8 for block in backward)
    ratio = backward[0].trace.over(whole)
    assert ratio.value == pytest.approx(backward[0].trace.value / whole.value)
    assert ratio.error >= backward[0].trace.error / whole.value * 0.999


def test_measuring_moves_nothing(tiny: Tiny, closures) -> None:
    before = snapshot(tiny)
    list(m.forward(tiny, closures, probes=2, sketch=5))
    list(m.backward(tiny, m.Curvature.of(tiny, closures), probes=2, iterations=1))
    assert same(before, snapshot(tiny))
    assert all(p.grad is None for p in tiny.parameters())


def test_moments_of_a_spectrum_are_unbiased() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([3.0, -1.0, 0.5, 0.0], dtype=torch.float64)
    for p in (2, 4):
        found = []
        for _ in range(4000):
            z = torch.randn(6, 4, dtype=torch.float64, generator=generator).sign()
            found.append(m.schatten(((z * values) @ z.T).triu(1), p))
        sample = m.Estimate.of(torch.tensor(found))
        assert abs(sample.value - float((values**p).sum())) < 4.5 * sample.error
        assert sample.error < 0.2 * sample.value


def test_what_cannot_be_measured_is_refused(tiny: Tiny, closures) -> None:
    with pytest.raises(ZeroBlockError, match="at least one batch"):
        m.Curvature.of(tiny, [])
    with pytest.raises(ZeroBlockError, match="2 probes"):
        list(m.forward(tiny, closures, probes=1))
    with pytest.raises(ZeroBlockError, match="no gradient"):
        m.Curvature.of(tiny, [lambda: torch.tensor(1.0)])
    with pytest.raises(ZeroBlockError, match="at least 4 vectors"):
        m.schatten(torch.zeros(3, 3), 4)
