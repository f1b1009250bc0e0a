"""Rounding to 8 bits, products of such numbers, and the join of the points, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zeroblock.ops.eight import EIGHT, LARGEST, reference

kernel = pytest.importorskip("zeroblock.ops.eight.triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAST = DEVICE == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
if DEVICE == "cuda" and not FAST:
    pytest.skip("this GPU has no e4m3", allow_module_level=True)
SHAPES = [(1, 1, 1), (2, 1, 3), (2, 5, 17), (3, 4, 64), (5, 3, 700)]
"""Points, tokens, numbers per row."""


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def values(rounded: tuple[Tensor, Tensor]) -> Tensor:
    return rounded[0].float() * rounded[1]


def test_the_reference_rounds_differences_by_themselves() -> None:
    first, change = drawn(6, 40), 1e-4 * drawn(6, 40, seed=1)
    numbers, scales = reference.rounded(torch.cat([first, first + change]), 6)
    assert numbers.dtype == EIGHT
    assert scales.shape == (12, 1)
    assert (numbers.float().abs().amax(1) == LARGEST).all()
    got = values((numbers, scales))
    torch.testing.assert_close(got[:6], first, rtol=1 / 16, atol=1e-2)
    torch.testing.assert_close(got[6:], change, rtol=1 / 15, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("points", "tokens", "n"), SHAPES)
def test_rounded(points: int, tokens: int, n: int, dtype: torch.dtype) -> None:
    x = drawn(points * tokens, n, dtype=dtype)
    for parted in (0, tokens):
        expected, got = reference.rounded(x, parted), kernel.rounded(x, parted)
        assert torch.equal(got[1], expected[1])
        if DEVICE == "cuda":
            assert torch.equal(got[0].view(torch.uint8), expected[0].view(torch.uint8))
        else:  # Triton's interpreter loses the carry where a mantissa rounds up to the next power of two
            close = torch.isclose(values(got), values(expected), rtol=1 / 7, atol=0)
            assert close.float().mean() > 0.85


def test_rows_of_zeros_and_rows_that_do_not_lie_in_order() -> None:
    x = drawn(16, 6).T
    x[2] = 0
    assert torch.equal(kernel.rounded(x)[1], reference.rounded(x)[1])
    numbers, scales = kernel.rounded(torch.cat([x, x]), 6)
    assert not numbers[6:].float().any()
    assert not numbers[2].float().any()
    assert (scales > 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_do_not_become_finite(bad: float) -> None:
    x = drawn(6, 40)
    x[1, 3] = bad
    x[5] = bad
    for ops in (reference, kernel):
        for tokens in (0, 3):
            found = values(ops.rounded(x, tokens))
            lost = {1, 4, 5} if tokens else {1, 5}  # the rows of other points are less the first point's
            assert [bool(row.isfinite().all()) for row in found] == [i not in lost for i in range(6)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("points", "tokens", "n"), [*SHAPES, (2, 3, 1030)])
def test_join(points: int, tokens: int, n: int, bias: bool) -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter cuts bf16 off
    y, b = drawn(points * tokens, n, dtype=dtype), drawn(n, dtype=dtype, seed=1) if bias else None
    expected = torch.cat([y[:tokens].float(), (y[tokens:].view(-1, tokens, n).float() + y[:tokens]).flatten(0, 1)])
    expected = (expected if b is None else expected + b.float()).to(dtype)
    assert torch.equal(reference.join_(y.clone(), tokens, b), expected)
    got = y.clone()
    assert kernel.join_(got, tokens, b) is got
    assert torch.equal(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "k", "n"), [(17, 256, 48), (80, 256, 128), (2305, 1024, 1040), (4610, 5120, 2048)])
def test_product(m: int, k: int, n: int) -> None:
    x, w = kernel.rounded(drawn(m, k, dtype=torch.bfloat16)), kernel.rounded(drawn(n, k, dtype=torch.bfloat16, seed=1))
    expected = reference.product(x, w)
    got = kernel.product(x, w)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2 * k**0.5)
    assert float((got.float() - expected.float()).norm() / expected.float().norm()) < 5e-3
