"""The GPU kernels (Triton): tiles of all products in one grid."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from ..gate import Act
from ..gate.triton import activate, gated
from . import reference


class Tile(NamedTuple):
    """Rows, columns and depth of a tile of 16-bit numbers, and how its program runs."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


TILES = (Tile(64, 64, 64, 4, 4), Tile(128, 64, 64, 8, 3))
"""A product takes the first of these whose tiles all run at once; then one kernel is faster than several of cuBLAS.
On an H200, 256 and 512 rows of bf16, µs (cuBLAS): SmolLM2's q, k and v 5.3 and 5.5 (8.8 and 9.6), OPT-125M's 6.6 and
cuBLAS (10.6 and 11.5), Qwen2.5-1.5B's 11.2 and 11.3 (14.0 and 15.5); OPT-1.3B's would take 20 and 38 (18 and 26)."""


@triton.jit
def _tile(x_ptr, w_ptr, rows, k, at_m, at_n, n, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
          PRECISION: tl.constexpr):  # fmt: skip
    """x[rows, :] @ w[columns, :]ᵀ in fp32."""
    acc = tl.zeros([M, N], tl.float32)
    at_k = tl.arange(0, K)
    for start in range(0, k, K):
        deep = start + at_k < k
        x = tl.load(x_ptr + at_m[:, None].to(tl.int64) * k + start + at_k[None, :],
                    mask=(at_m < rows)[:, None] & deep[None, :], other=0.0)  # fmt: skip
        w = tl.load(w_ptr + at_n[:, None].to(tl.int64) * k + start + at_k[None, :],
                    mask=(at_n < n)[:, None] & deep[None, :], other=0.0)  # fmt: skip
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _one(x_ptr, w_ptr, b_ptr, out_ptr, rows, k, n, tile_n,
         BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    at_m = tl.program_id(1) * M + tl.arange(0, M)
    at_n = tile_n * N + tl.arange(0, N)
    acc = _tile(x_ptr, w_ptr, rows, k, at_m, at_n, n, M, N, K, PRECISION)
    if BIAS:
        acc += tl.load(b_ptr + at_n, mask=at_n < n, other=0.0).to(tl.float32)[None, :]
    inside = (at_m < rows)[:, None] & (at_n < n)[None, :]
    place = at_m[:, None].to(tl.int64) * n + at_n[None, :]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _project(
    x_ptr, w0, w1, w2, b0, b1, b2, o0, o1, o2, rows, k, n0, n1, n2, tiles0, tiles1,
    BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < tiles0:
        _one(x_ptr, w0, b0, o0, rows, k, n0, tile, BIAS, M, N, K, PRECISION)
    elif tile < tiles0 + tiles1:
        _one(x_ptr, w1, b1, o1, rows, k, n1, tile - tiles0, BIAS, M, N, K, PRECISION)
    else:
        _one(x_ptr, w2, b2, o2, rows, k, n2, tile - tiles0 - tiles1, BIAS, M, N, K, PRECISION)


@triton.jit
def _project_gated(
    x_ptr, gate_ptr, up_ptr, out_ptr, rows, k, n,
    GELU: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    at_m = tl.program_id(1) * M + tl.arange(0, M)
    at_n = tl.program_id(0) * N + tl.arange(0, N)
    gate = tl.zeros([M, N], tl.float32)
    up = tl.zeros([M, N], tl.float32)
    at_k = tl.arange(0, K)
    for start in range(0, k, K):
        deep = start + at_k < k
        x = tl.load(x_ptr + at_m[:, None].to(tl.int64) * k + start + at_k[None, :],
                    mask=(at_m < rows)[:, None] & deep[None, :], other=0.0)  # fmt: skip
        place = at_n[:, None].to(tl.int64) * k + start + at_k[None, :]
        inside = (at_n < n)[:, None] & deep[None, :]
        gate = tl.dot(x, tl.trans(tl.load(gate_ptr + place, mask=inside, other=0.0)), gate, input_precision=PRECISION)
        up = tl.dot(x, tl.trans(tl.load(up_ptr + place, mask=inside, other=0.0)), up, input_precision=PRECISION)
    act = activate(gate.to(DTYPE).to(tl.float32), GELU).to(DTYPE).to(tl.float32)  # rounded where torch rounds
    out = act * up.to(DTYPE).to(tl.float32)
    inside = (at_m < rows)[:, None] & (at_n < n)[None, :]
    tl.store(out_ptr + at_m[:, None].to(tl.int64) * n + at_n[None, :], out.to(DTYPE), mask=inside)


def project(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """See ``reference.py``."""
    rows, k = x.numel() // x.shape[-1], x.shape[-1]
    sizes = [len(weight) for weight in weights]
    tile = _tile_of(x, sizes) if all(weight.is_contiguous() for weight in weights) else None
    if tile is None:
        return reference.project(x, weights, biases)
    flat = x.reshape(rows, k).contiguous()
    outs = [torch.empty(rows, n, dtype=x.dtype, device=x.device) for n in sizes]
    tiles = [triton.cdiv(n, tile.columns) for n in sizes]
    fill = [0] * (3 - len(weights))
    matrices, results = ([*some, *[some[0]] * len(fill)] for some in (weights, outs))
    bias = biases[0] is not None
    vectors = [*(biases if bias else weights), *[weights[0]] * len(fill)]
    with torch.cuda.device_of(x):
        _project[(sum(tiles), triton.cdiv(rows, tile.rows))](
            flat, *matrices, *vectors, *results, rows, k, *sizes, *fill, *[*tiles, *fill][:2],
            BIAS=bias, **_options(tile, x),
        )  # fmt: skip
    return [out.view(*x.shape[:-1], -1) for out in outs]


def project_gated(x: Tensor, gate: Tensor, up: Tensor, act: Act) -> Tensor:
    """See ``reference.py``."""
    rows, k = x.numel() // x.shape[-1], x.shape[-1]
    tile = _tile_of(x, [len(gate)]) if gate.is_contiguous() and up.is_contiguous() else None
    if tile is None:
        return gated(F.linear(x, gate), F.linear(x, up), act)
    flat = x.reshape(rows, k).contiguous()
    out = torch.empty(rows, len(gate), dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        _project_gated[(triton.cdiv(len(gate), tile.columns), triton.cdiv(rows, tile.rows))](
            flat, gate, up, out, rows, k, len(gate), GELU=act is Act.GELU_TANH, **_options(tile, x)
        )
    return out.view(*x.shape[:-1], -1)


def _tile_of(x: Tensor, sizes: Sequence[int]) -> Tile | None:
    """The tile to cut products into; None if they fill the device one by one."""
    rows, programs = x.numel() // x.shape[-1], _programs(x.device)
    for tile in TILES:
        if triton.cdiv(rows, tile.rows) * sum(triton.cdiv(n, tile.columns) for n in sizes) <= programs:
            return tile
    return None


@functools.cache
def _programs(device: torch.device) -> int:
    """The number of programs that run at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1 << 30


def _options(tile: Tile, x: Tensor) -> dict[str, Any]:
    depth = tile.depth if x.dtype.itemsize == 2 else tile.depth // 2
    return {
        "M": tile.rows, "N": tile.columns, "K": depth, "PRECISION": "tf32", "num_warps": tile.warps,
        "num_stages": tile.stages,
    }  # fmt: skip
