"""The compiled loops on integers against plain torch, to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from toy import bits
from zeroblock.noise import BASIS, Distribution, Draw, Key, RandomMask, Rounding, Rows, SmallMask
from zeroblock.ops import integer
from zeroblock.ops.integer import Integers, cpu, packed, reference, unpacked
from zeroblock.ops.shared import cpu as shared

KEY = Key(2**63 + 5, 6, 2)
MASKS = (None, SmallMask(0.02), RandomMask(KEY.to(step=4, stream=BASIS), 2**31))
OFFSETS = (0, 3, 2**33 + 6, 2**34 - 5)
SHAPES = [(1, 2, 1), (3, 38, 19), (5, 64, 16), (7, 330, 330), (3, 1408, 64)]
"""Rows, columns and integers per group; tiles of 1,024 end inside and outside of groups, and the last one is ragged."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = [
    pytest.param(bits, zeros, dtype, id=f"int{bits}-{'zeros-' if zeros else ''}{str(dtype).removeprefix('torch.')}")
    for bits, zeros, dtype in itertools.product((8, 4), (False, True), DTYPES)
]
every_form = pytest.mark.parametrize(("width", "zeros", "dtype"), FORMS)


def stored(width: int, shape: tuple[int, int, int], zeros: bool, dtype: torch.dtype) -> Integers:
    """Random integers over their whole range; a group of them has a scale that is subnormal in fp16."""
    m, n, group = shape
    generator = torch.Generator().manual_seed(m)
    limit = (1 << width - 1) - 1
    integers = torch.randint(-limit - zeros, limit + 1, (m, n), generator=generator)
    scales = torch.rand(m, n // group, generator=generator).add(0.1).mul(0.01)
    scales[-1, -1] = 3e-7
    points = torch.randint(-limit - 1, limit + 1, scales.shape, generator=generator).to(torch.int8)
    codes = packed(integers, width).view(torch.float8_e4m3fn)
    return Integers(codes, width, scales.to(dtype), points if zeros else None)


def shapes(width: int) -> list[tuple[int, int, int]]:
    """Those of an even number of columns; integers of 8 bits take odd ones, too."""
    return SHAPES if width == 4 else [*SHAPES, (5, 37, 37), (3, 1407, 21)]


def draws(n: int) -> Iterator[Draw]:
    """Every mask and distribution, with offsets and places that take turns."""
    for number, (mask, distribution) in enumerate(itertools.product(MASKS, Distribution)):
        rows = Rows(n // 2 + 1, 3 * n, first=number) if number % 3 == 2 else None
        yield Draw(KEY, OFFSETS[number % 4], distribution, mask, rows)


def moved(one: Integers, move: Callable[[Integers], None]) -> Tensor:
    """The bytes of a copy of some integers, after a move."""
    copy = one._replace(codes=one.codes.clone())
    move(copy)
    return copy.codes.view(torch.uint8)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, or a matrix of few tiles on three of them."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    monkeypatch.setattr(shared, "SPLIT", 1)


@every_form
def test_expanded_matrices(width: int, zeros: bool, dtype: torch.dtype, threads: None) -> None:
    for shape in shapes(width):
        one = stored(width, shape, zeros, dtype)
        found = cpu.expand(one)
        assert found.shape == shape[:2]
        assert torch.equal(bits(found), bits(reference.expand(one))), shape


@every_form
def test_perturbed_matrices(width: int, zeros: bool, dtype: torch.dtype, threads: None) -> None:
    for shape in shapes(width):
        one = stored(width, shape, zeros, dtype)
        for draw, rounding in itertools.product(draws(shape[1]), Rounding):
            for eps in (1e-3, -0.1):
                found, expected = (module.perturb(one, draw, eps, rounding) for module in (cpu, reference))
                assert torch.equal(bits(found), bits(expected)), (shape, draw, rounding)
            pairs = (module.perturb_pair(one, draw, 1e-3, rounding) for module in (cpu, reference))
            for found, expected in zip(*pairs, strict=True):
                assert torch.equal(bits(found), bits(expected)), (shape, draw, rounding)


@every_form
def test_integers_that_move_by_noise(width: int, zeros: bool, dtype: torch.dtype, threads: None) -> None:
    """By less than a step of the grid, and to the ends of the range; with a decay, and by several probes."""
    for shape in shapes(width):
        one = stored(width, shape, zeros, dtype)
        for draw, rounding in itertools.product(draws(shape[1]), Rounding):
            for alpha, decay in ((2e-3, 1.0), ((0.01, -0.3, 2e-3), 0.9), (torch.tensor([1e-3]), 1.1), (0.0, 1.0)):
                found, expected = (
                    moved(one, lambda x, m=m, a=alpha, d=decay: m.add_noise_(x, draw, a, d, rounding))  # noqa: B023
                    for m in (cpu, reference)
                )
                assert torch.equal(found, expected), (shape, draw, rounding, alpha, decay)
                assert (alpha != 0.0) or torch.equal(found, one.codes.view(torch.uint8))


@every_form
def test_integers_that_move_by_a_given_change(width: int, zeros: bool, dtype: torch.dtype, threads: None) -> None:
    """Some of them, from anywhere on; their neighbours stay."""
    for shape in shapes(width):
        one = stored(width, shape, zeros, dtype)
        n = shape[0] * shape[1]
        delta = torch.linspace(-0.02, 0.02, n)
        for draw, rounding, decay in itertools.product(draws(shape[1]), Rounding, (1.0, 0.8)):
            for start, stop in ((0, n), (n // 4 * 2, n), (2, n // 2 * 2 - 2)):
                change = delta[start : max(start, stop)]
                found, expected = (
                    moved(one, lambda x, m=m: m.add_(x, change, start, draw, decay, rounding))  # noqa: B023
                    for m in (cpu, reference)
                )
                assert torch.equal(found, expected), (shape, draw, rounding, decay, start)


@pytest.mark.parametrize("width", [8, 4])
def test_the_ends_of_the_range(width: int) -> None:
    """With zero points integers take one value more; beyond the end they stay, whatever the size of the step."""
    one = stored(width, (1, 64, 64), True, torch.float32)
    largest = (1 << width - 1) - 1
    for zeros, size in itertools.product((one.zeros, None), (3.0, 1e9, float("inf"))):
        for sign, end in ((1, largest), (-1, -largest - (zeros is not None))):
            both = one._replace(codes=packed(torch.zeros(1, 64), width), zeros=zeros)
            cpu.add_(both, torch.full((64,), sign * size), 0, Draw(KEY), 1.0, Rounding.STOCHASTIC)
            assert (unpacked(both.codes, width) == end).all()


def test_the_step_is_read_from_a_clock() -> None:
    one = stored(8, (3, 64, 64), False, torch.bfloat16)
    clock = torch.tensor([6, 4])
    timed = Draw(KEY.to(step=1, clock=clock), 3, mask=RandomMask(KEY.to(step=0, stream=BASIS, clock=clock), 2**31))
    for draw in (timed, Draw(KEY, 3, mask=MASKS[2])):
        found = cpu.perturb(one, draw, 1e-3, Rounding.STOCHASTIC)
        assert torch.equal(found, reference.perturb(one, Draw(KEY, 3, mask=MASKS[2]), 1e-3, Rounding.STOCHASTIC))
        found, expected = (
            moved(one, lambda x, m=m, d=d: m.add_noise_(x, d, 0.01, 1.0, Rounding.STOCHASTIC))
            for m, d in ((cpu, draw), (reference, Draw(KEY, 3, mask=MASKS[2])))
        )
        assert torch.equal(found, expected)


OPERATIONS: dict[str, Callable[[Integers], Any]] = {
    "expand": integer.expand,
    "perturb": lambda one: integer.perturb(one, Draw(KEY), 1e-3),
    "perturb_pair": lambda one: integer.perturb_pair(one, Draw(KEY), 1e-3),
    "add_noise_": lambda one: integer.add_noise_(one, Draw(KEY), 0.01),
    "add_": lambda one: integer.add_(one, torch.ones(128), 0, Draw(KEY), 1.0, Rounding.NEAREST),
}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The versions that are called, in order."""
    versions: list[Any] = []

    def noted(version: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (versions.append(version), run(*args))[1]

    for version, name in itertools.product((cpu, reference), OPERATIONS):
        monkeypatch.setattr(version, name, noted(version, getattr(version, name)))
    return versions


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_loops_serve_the_cpu(name: str, called: list[Any]) -> None:
    OPERATIONS[name](stored(8, (1, 128, 64), False, torch.float32))
    assert called == [cpu]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("width", [8, 4])
def test_the_product_some_rows_at_a_time(
    width: int, zeros: bool, biased: bool, called: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stored(width, (5, 64, 32), zeros, torch.float32)
    x, bias = torch.randn(2, 3, 64), torch.randn(5) if biased else None
    expected = F.linear(x, reference.expand(one), bias)
    assert torch.equal(integer.linear(x, one, bias), expected)
    for numbers, pieces in ((128, 3), (1, 5), (320, 1)):
        called.clear()
        monkeypatch.setattr(integer, "PIECE", numbers)
        torch.testing.assert_close(integer.linear(x, one, bias), expected)
        assert called == [cpu] * pieces


def test_plain_torch_takes_the_rest(called: list[Any]) -> None:
    """Scales in fp64, and bytes with gaps between them."""
    one = stored(8, (1, 128, 64), False, torch.float32)
    integer.expand(one._replace(scales=one.scales.double()))
    integer.expand(one._replace(codes=torch.zeros(1, 256, dtype=torch.uint8)[:, ::2]))
    assert called == [reference, reference]
