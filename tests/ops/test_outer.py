"""A given change of the weights, whole or as an outer product: three implementations of it."""

from __future__ import annotations

import itertools

import pytest
import torch
from ops_toy import DTYPES, GPU, device, few_lanes, weights

from toy import bits
from zeroblock import ops
from zeroblock.noise import Draw, Key, Rounding
from zeroblock.ops.outer import cpu, reference

triton = pytest.importorskip("zeroblock.ops.outer.triton")

KERNELS = [pytest.param(cpu, id="cpu"), pytest.param(triton, id="triton")]


@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
@pytest.mark.parametrize(("n", "offset"), [(4096, 0), (4096 + 5, 2**33 + 7), (4093, 3)])
def test_whole_and_ragged_tiles_agree_to_the_bit(small: bool, n: int, offset: int, monkeypatch) -> None:
    few_lanes(monkeypatch, small, n, offset)
    x, ours, delta = weights(n, torch.float16), weights(n, torch.float16).to(GPU), torch.linspace(-1, 1, n)
    for module, t in ((triton, ours), (reference, x)):
        draw = Draw(Key(1, 2), offset)
        module.add_(t, delta.to(t.device), 0.1, draw, decay=0.9, rounding=Rounding.STOCHASTIC)
    assert torch.equal(bits(ours), bits(x))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounding", Rounding)
def test_every_form_of_the_kernel_agrees_to_the_bit(kernel, dtype: torch.dtype, rounding: Rounding) -> None:
    for offset, decay, flip in itertools.product((0, 5, 2**33 + 7), (1.0, 0.9), (False, True)):
        n = 2050 if offset == 0 else 37
        results = []
        for module in (reference, kernel):
            x = weights(n, dtype).to(device(module))
            delta = torch.linspace(-1, 1, n, device=x.device)
            module.add_(x, delta, 1e-3, Draw(Key(5, 6), offset), decay=decay, rounding=rounding, flip=flip)
            results.append(bits(x))
        assert torch.equal(*results), (offset, decay, flip)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "rank", "offset"), [((3, 5), 1, 0), ((7, 33), 2, 11), ((300, 9), 4, 2**33 + 8)])
def test_an_outer_product_is_added_as_the_product_would_be(dtype, shape, rank, offset) -> None:
    m, n = shape
    generator = torch.Generator().manual_seed(m)
    z, v = torch.randn(m, rank, generator=generator), torch.randn(n, rank, generator=generator)
    x, draw = weights(m * n, dtype).view(m, n), Draw(Key(5, 6), offset)
    product = sum(torch.outer(z[:, k], v[:, k]) for k in range(rank))
    for decay, flip in ((1.0, False), (0.9, True)):
        options = {"decay": decay, "rounding": Rounding.STOCHASTIC, "flip": flip}
        expected = ops.add_(x.clone(), product, -1e-2, draw, **options)
        assert torch.equal(bits(ops.add_outer_(x.clone(), z, v, -1e-2, draw, **options)), bits(expected))
        for module in (reference, cpu, triton):
            out = x.clone().to(device(module))
            module.add_outer_(out.view(-1), z.to(out.device), v.to(out.device), -1e-2, draw, **options)
            assert torch.equal(bits(out), bits(expected)), module


@pytest.mark.parametrize("module", [pytest.param(reference, id="reference"), *KERNELS])
def test_the_step_of_the_rounding_bits_is_read_on_the_device(module) -> None:
    x = weights(50, torch.bfloat16).to(device(module))
    clock, delta = torch.tensor([6, 4], device=x.device), torch.linspace(-1, 1, 50, device=x.device)
    results = []
    for key in (Key(5, 6), Key(5, 1, clock=clock), Key(5, 1)):
        out = x.clone()
        module.add_(out, delta, 1e-3, Draw(key, 3), decay=1.0, rounding=Rounding.STOCHASTIC)
        results.append(bits(out))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_all_65536_values_survive_a_vanishing_step(dtype: torch.dtype) -> None:
    """A representable weight that moves by nothing stays, whatever the rounding bits; infinities and NaNs too."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for rounding, step in itertools.product(Rounding, range(4)):
        y = ops.add_(x.clone(), torch.zeros(x.shape), 1.0, Draw(Key(0, step)), rounding=rounding)
        finite = x.isfinite()
        assert torch.equal(y[finite], x[finite])
        assert y[x.isnan()].isnan().all()
        assert torch.equal(y[x.isinf()], x[x.isinf()])
