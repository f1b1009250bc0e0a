"""Some columns of a tensor take those columns of its noise and of its rounding bits, in every implementation."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from ops_toy import GPU, MASKS, device, weights
from torch import Tensor

from toy import bits
from zeroblock import ops
from zeroblock.noise import Distribution, Draw, Key, Rounding, Rows

pytest.importorskip("triton")

OFFSET, M, N = 2**33 + 5, 4, 37
CUTS = [(slice(0, M), slice(3, 20)), (slice(1, 3), slice(36, 37))]
"""Some columns, and a single one in some of the rows."""


def cut_of(whole: Draw, rows: slice, columns: slice) -> Draw:
    """The draw of a part of an (M, N) matrix."""
    stride = Rows(columns.stop - columns.start, N)
    return whole.to(offset=whole.offset + rows.start * N + columns.start, rows=stride)


def both(run: Any, dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare run(tensors, draw) on parts of a matrix with the parts of run on the whole."""
    matrix = weights(M * N, dtype).view(M, N)
    for number, (rows, columns) in enumerate(CUTS):
        draw = Draw(Key(5, 6, 2), OFFSET, Distribution(number % 2), MASKS[1 + number])
        for package in ("noise", "outer", "adam"):
            module = importlib.import_module(f"zeroblock.ops.{package}")
            monkeypatch.setattr(module, "backend", lambda operation, device: importlib.import_module(
                f"zeroblock.ops.{operation}.{kernel}"))  # fmt: skip
        place = GPU if kernel == "triton" else "cpu"
        whole = run(matrix.to(place), draw, slice(0, M), slice(0, N))
        part = run(matrix[rows, columns].to(place), cut_of(draw, rows, columns), rows, columns)
        for expected, got in zip(whole, part, strict=True):
            assert torch.equal(bits(expected[rows, columns]), bits(got)), (rows, columns)


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("reference", torch.bfloat16), ("cpu", torch.float32), ("cpu", torch.bfloat16), ("triton", torch.bfloat16)],
)
def test_a_cut_is_perturbed_as_the_whole_is(kernel: str, dtype: torch.dtype, monkeypatch) -> None:
    def run(x: Tensor, draw: Draw, rows: slice, columns: slice) -> tuple[Tensor, ...]:
        plus, minus = ops.perturb_pair(x, draw, 1e-3)
        return plus, minus, ops.add_noise_(x.clone(), draw, (0.1, -0.3), decay=0.9)

    both(run, dtype, kernel, monkeypatch)


@pytest.mark.parametrize("kernel", ["reference", "cpu", "triton"])
def test_a_cut_is_moved_as_the_whole_is(kernel: str, monkeypatch) -> None:
    z, v = weights(2 * M, torch.float32).view(M, 2), weights(2 * N, torch.float32).view(N, 2)
    given = weights(M * N, torch.float32).view(M, N)

    def run(x: Tensor, draw: Draw, rows: slice, columns: slice) -> tuple[Tensor, ...]:
        delta = given[rows, columns].to(x.device)
        m, second = (torch.zeros(x.shape, dtype=torch.bfloat16, device=x.device) for _ in range(2))
        moved = ops.adam_(x.clone(), m, second, draw, (1, -0.1, 1, 1, 0.3, 0.1), betas=(0.9, 0.99), eps=1e-8)
        return (
            ops.add_(x.clone(), delta, 0.1, draw),
            ops.add_outer_(x.clone(), z[rows].to(x.device), v[columns].to(x.device), 0.1, draw.to(mask=None)),
            moved, m, second,
        )  # fmt: skip

    both(run, torch.bfloat16, kernel, monkeypatch)


@pytest.mark.parametrize("kernel", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("first", [5, 34])
def test_a_span_of_a_cut_begins_anywhere(kernel: str, first: int) -> None:
    """Rules walk along a tensor in spans that do not end where rows do."""
    module = importlib.import_module(f"zeroblock.ops.noise.{kernel}")
    draw = Draw(Key(1, 2), OFFSET, rows=Rows(17, N))
    whole, part = torch.empty(3 * 17), torch.empty(3 * 17 - first, device=device(module))
    importlib.import_module("zeroblock.ops.noise.reference").fill_(whole, draw, (1.0,))
    module.fill_(part, draw.at(first), (1.0,))
    assert torch.equal(bits(part), bits(whole[first:]))


def test_a_strided_matrix_may_be_a_cut_itself() -> None:
    x, draw = weights(N * M, torch.float32).view(N, M).T, Draw(Key(3, 4), OFFSET)
    cut = cut_of(draw, slice(0, M), slice(3, 20))
    got = ops.add_noise_(x.clone()[:, 3:20], cut, 0.1, rounding=Rounding.NEAREST)
    assert torch.equal(bits(got), bits(ops.add_noise_(x.clone(), draw, 0.1)[:, 3:20]))
