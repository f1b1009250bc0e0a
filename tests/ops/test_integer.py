"""Kernels on integers against plain torch, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops_toy import GPU

from zeroblock import Distribution, Draw, Key, Rounding
from zeroblock.noise import BASIS, RandomMask
from zeroblock.ops import integer
from zeroblock.ops.integer import Integers, packed, reference, triton, unpacked
from zeroblock.ops.shared import triton as shared

KEY = Key(3, 5)


def stored(bits: int, shape: tuple[int, int], group: int, zeros: bool, dtype: torch.dtype) -> Integers:
    generator = torch.Generator().manual_seed(shape[0])
    limit = (1 << bits - 1) - 1
    integers = torch.randint(-limit - zeros, limit + 1, shape, generator=generator)
    groups = (shape[0], shape[1] // group)
    scales = torch.rand(groups, generator=generator).add(0.1).mul(0.01).to(dtype)
    points = torch.randint(-limit - 1, limit + 1, groups, generator=generator).to(torch.int8) if zeros else None
    codes = packed(integers, bits).view(torch.float8_e4m3fn)
    return Integers(*(x.to(GPU) if isinstance(x, torch.Tensor) else x for x in (codes, bits, scales, points)))


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.uint8)


NORMAL, SIGNS = Draw(KEY), Draw(KEY, 0, Distribution.RADEMACHER, RandomMask(KEY.to(stream=BASIS), 2**31))
CASES = [
    (8, (3, 128), 64, False, torch.bfloat16, NORMAL.at(16)),
    (8, (3, 37), 37, True, torch.float16, SIGNS.at(13)),
    (4, (3, 128), 64, False, torch.float16, SIGNS.at(8)),
    (4, (3, 96), 32, True, torch.bfloat16, NORMAL.at(1 << 34)),
    (4, (3, 22), 22, False, torch.float32, NORMAL.at(3)),
]


@pytest.fixture
def few_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles, whole and ragged."""
    monkeypatch.setattr(shared, "SMALL_GROUPS", 16)


@pytest.mark.parametrize(("bits", "shape", "group", "zeros", "dtype", "draw"), CASES)
def test_expanded_and_perturbed_matrices(
    bits: int, shape: Any, group: int, zeros: bool, dtype: torch.dtype, draw: Draw, few_lanes: None
) -> None:
    one = stored(bits, shape, group, zeros, dtype)
    expanded = triton.expand(one)
    assert expanded.shape == shape
    assert expanded.dtype == dtype
    assert torch.equal(bits_of(expanded), bits_of(reference.expand(one)))
    expected = reference.perturb_pair(one, draw, 1e-3, Rounding.STOCHASTIC)
    timed = draw.to(key=Key(3, 0, clock=torch.tensor([KEY.step, KEY.step], device=GPU)))
    if draw.mask is not None:
        timed = timed.to(mask=RandomMask(timed.key.to(stream=BASIS), 2**31))
    found = triton.perturb_pair(one, timed, 1e-3, Rounding.STOCHASTIC)
    assert all(torch.equal(bits_of(a), bits_of(b)) for a, b in zip(found, expected, strict=True))
    for rounding in Rounding:
        found = triton.perturb(one, draw, -1e-3, rounding)
        assert torch.equal(bits_of(found), bits_of(reference.perturb(one, draw, -1e-3, rounding)))


@pytest.mark.parametrize(("bits", "shape", "group", "zeros", "dtype", "draw"), CASES[:4])
def test_integers_move(
    bits: int, shape: Any, group: int, zeros: bool, dtype: torch.dtype, draw: Draw, few_lanes: None
) -> None:
    start = stored(bits, shape, group, zeros, dtype)
    for alpha, decay in (([0.01, -0.03], 0.9), (torch.tensor([0.02], device=GPU), 1.0), (0.0, 1.0)):
        expected, found = (start._replace(codes=start.codes.clone()) for _ in range(2))
        reference.add_noise_(expected, draw, alpha, decay, Rounding.STOCHASTIC)
        triton.add_noise_(found, draw, alpha, decay, Rounding.STOCHASTIC)
        assert torch.equal(bits_of(found.codes), bits_of(expected.codes))
        moved = unpacked(found.codes, bits) != unpacked(start.codes, bits)
        assert moved.any().item() == (alpha != 0.0)


def test_the_ends_of_the_range() -> None:
    """With zero points integers take one value more."""
    one = stored(4, (1, 64), 64, True, torch.float32)
    for zeros, lowest in ((one.zeros, -8), (None, -7)):
        moved = Integers(packed(torch.zeros(1, 64), 4).to(GPU), 4, one.scales, zeros)
        integer.add_(moved, torch.full((64,), -1.0, device=GPU), 0, NORMAL, 1.0, Rounding.STOCHASTIC)
        assert (unpacked(moved.codes, 4) == lowest).all()


def test_bytes_that_are_no_words_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer, "backend", lambda operation, device: triton)
    one = stored(4, (1, 64), 64, False, torch.float32)
    odd = torch.zeros(33, dtype=torch.uint8, device=GPU)[1:].view(1, 32)  # begins at an odd address
    odd.copy_(one.codes.view(torch.uint8))
    for codes in (odd, one.codes):
        integer.add_noise_(one._replace(codes=codes), NORMAL, 0.02)
    assert torch.equal(bits_of(odd), bits_of(one.codes))
