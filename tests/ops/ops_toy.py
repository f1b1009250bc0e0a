"""Weights, masks and devices that the tests of the operations share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from zeroblock.noise import BASIS, Key, RandomMask, SmallMask

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
GPU = "cuda" if torch.cuda.is_available() else "cpu"  # without one Triton's interpreter runs on the CPU
MASKS = (None, SmallMask(0.5), RandomMask(Key(5, 4, stream=BASIS), 2**31))


def device(module: ModuleType) -> str:
    """Where an implementation runs."""
    return GPU if module.__name__.endswith("triton") else "cpu"


def met(module: ModuleType, *values: Any, half: int) -> Iterator[tuple[Any, ...]]:
    """The product of some collections; for Triton's interpreter, which is slow, one ``half`` of it, even or odd.

    In either half, values of all collections but one still meet; dtypes take the halves in turn.
    """
    interpreted = module.__name__.endswith("triton") and GPU == "cpu"
    for choice in itertools.product(*map(enumerate, values)):
        if not interpreted or (sum(number for number, _ in choice) + half) % 2 == 0:
            yield tuple(value for _, value in choice)


def weights(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Magnitudes from subnormal fp16 to 1, both signs, some zeros."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=generator) * torch.logspace(-9, 0, n)
    x[::17] = 0.0
    return x.to(dtype)


def few_lanes(monkeypatch: pytest.MonkeyPatch, small: bool, n: int, offset: int) -> None:
    """Make Triton launch n elements as a ragged, several whole and another ragged tile."""
    from zeroblock.ops.shared import triton

    monkeypatch.setattr(triton, "SMALL", 1 << 18 if small else 0)
    monkeypatch.setattr(triton, "GROUPS", 64)
    monkeypatch.setattr(triton, "MIN_WHOLE_TILES", 4)
    launches = triton.tiles_of(n, offset, 64)[1]
    assert [whole for _, _, whole in launches].count(True) == 1
