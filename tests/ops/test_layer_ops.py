"""Kernels of a layer's small operations against plain torch: odd shapes, strides, 16-bit dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zeroblock.ops.gate import Act
from zeroblock.ops.gate import reference as gate
from zeroblock.ops.norm import Scaling
from zeroblock.ops.norm import reference as norm
from zeroblock.ops.project import reference as project
from zeroblock.ops.rotary import reference as rotary

gate_kernel = pytest.importorskip("zeroblock.ops.gate.triton")
norm_kernel = pytest.importorskip("zeroblock.ops.norm.triton")
project_kernel = pytest.importorskip("zeroblock.ops.project.triton")
rotary_kernel = pytest.importorskip("zeroblock.ops.rotary.triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PRODUCTS = DTYPES if DEVICE == "cuda" else DTYPES[:2]  # Triton's interpreter cuts bf16 off and has no product of it
ULP = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative tolerance: results are rounded once, from sums in another order."""


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaling", Scaling)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 17), (1, 5, 64), (3, 700)])
def test_norm(dtype: torch.dtype, scaling: Scaling, shape: tuple[int, ...]) -> None:
    x, weight = drawn(*shape, dtype=dtype), drawn(shape[-1], dtype=dtype, seed=1)
    got = norm_kernel.rms_norm(x, weight, 1e-5, scaling)
    torch.testing.assert_close(got, norm.rms_norm(x, weight, 1e-5, scaling), rtol=2 * ULP[dtype], atol=ULP[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 17), (3, 700)])
def test_layer_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = drawn(*shape, dtype=dtype) + 3
    weight, bias = (drawn(shape[-1], dtype=dtype, seed=seed) for seed in (1, 2))
    got = norm_kernel.layer_norm(x, weight, bias, 1e-5)
    expected = norm.layer_norm(x.float(), weight.float(), bias.float(), 1e-5).to(dtype)
    torch.testing.assert_close(got, expected, rtol=2 * ULP[dtype], atol=4 * ULP[dtype])


def test_norm_of_a_strided_input() -> None:
    x, weight = drawn(2, 8, 3).transpose(1, 2), drawn(8)
    got = norm_kernel.rms_norm(x, weight, 1e-5, Scaling.WIDE)
    torch.testing.assert_close(got, norm.rms_norm(x, weight, 1e-5, Scaling.WIDE))


@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize(("rows", "heads", "keys", "size"), [(1, 1, 1, 2), (2, 3, 1, 8), (2, 4, 2, 12), (1, 9, 3, 64)])
def test_rotary_is_exact(dtype: torch.dtype, rows: int, heads: int, keys: int, size: int) -> None:
    query, key = (drawn(rows, 5, h, size, dtype=dtype, seed=h).transpose(1, 2) for h in (heads, keys))
    for tables in (1, rows):  # the tables of one row serve all
        cos, sin = drawn(tables, 5, size, dtype=dtype, seed=7), drawn(tables, 5, size, dtype=dtype, seed=8)
        for got, expected in zip(
            rotary_kernel.rotate(query, key, cos, sin), rotary.rotate(query, key, cos, sin), strict=True
        ):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", Act)
@pytest.mark.parametrize("shape", [(1,), (2, 3, 17), (1, 3, 700)])
def test_gate(dtype: torch.dtype, act: Act, shape: tuple[int, ...]) -> None:
    a, b = drawn(*shape, dtype=dtype) * 3, drawn(*shape, dtype=dtype, seed=1)
    torch.testing.assert_close(
        gate_kernel.gated(a, b, act), gate.gated(a, b, act), rtol=2 * ULP[dtype], atol=ULP[dtype] / 4
    )


@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize("sizes", [(5,), (70, 3), (64, 16, 130)])
@pytest.mark.parametrize("bias", [True, False])
def test_project(dtype: torch.dtype, sizes: tuple[int, ...], bias: bool) -> None:
    x = drawn(2, 37, 40, dtype=dtype)
    weights = [drawn(n, 40, dtype=dtype, seed=n) for n in sizes]
    biases = [drawn(n, dtype=dtype, seed=n + 1) if bias else None for n in sizes]
    got = project_kernel.project(x, weights, biases)
    rough = 1e-2 if dtype == torch.float32 and DEVICE == "cuda" else 0  # TF32
    for one, expected in zip(got, project.project(x, weights, biases), strict=True):
        torch.testing.assert_close(one, expected, rtol=2 * ULP[dtype] + rough, atol=20 * ULP[dtype] + rough)


def test_products_of_strided_matrices() -> None:
    x, matrix = drawn(1, 5, 16), drawn(16, 24, seed=1).T
    (got,) = project_kernel.project(x, [matrix], [None])
    torch.testing.assert_close(got, project.project(x, [matrix], [None])[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(
        project_kernel.project_gated(x, matrix, matrix, Act.SILU),
        project.project_gated(x, matrix, matrix, Act.SILU),
        rtol=2e-2,
        atol=0.1,
    )


@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize("act", Act)
def test_project_gated(dtype: torch.dtype, act: Act) -> None:
    x, a, b = drawn(1, 70, 40, dtype=dtype), drawn(90, 40, dtype=dtype, seed=1), drawn(90, 40, dtype=dtype, seed=2)
    rough = (
        0.1 if dtype == torch.float32 and DEVICE == "cuda" else 0
    )  # TF32, on sums of 40 products that are then multiplied
    torch.testing.assert_close(
        project_kernel.project_gated(x, a, b, act),
        project.project_gated(x, a, b, act),
        rtol=4 * ULP[dtype] + rough,
        atol=40 * ULP[dtype] + rough,
    )
