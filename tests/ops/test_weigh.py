"""Coefficients in units of their running size: the kernel against plain torch and the host, to the bit."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

import zeroblock as zb
from zeroblock.ops.weigh import reference

kernel = pytest.importorskip("zeroblock.ops.weigh.triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, where there is no size yet


def bits(x: Tensor) -> list[int]:
    """NaN equals NaN, and -0 is not 0."""
    return torch.where(x.isnan(), math.nan, x).view(torch.int64).tolist()


@pytest.mark.parametrize("probes", [1, 2, 4, 8, 16, 64])
def test_the_kernel_equals_torch_and_the_host(probes: int) -> None:
    """Over freaks, zeros, what is not finite, and steps that are not taken."""
    draws, rule = random.Random(probes), zb.Normalized()
    tables = [torch.zeros(4, 2, dtype=torch.float64, device=DEVICE) for _ in range(2)]
    host = [[0.0, 0.0] for _ in range(4)]
    for step in range(40):
        size = (0.0 if step < 3 else 1.0) * (1e4 if step % 10 == 9 else 1.0)
        numbers = [size * draws.gauss(0, 1) * (draws.random() < 0.8) for _ in range(probes)]
        live = step % 7 != 6
        if not live:
            numbers[0] = (math.nan, math.inf, -math.inf)[step % 3]
        coeffs = torch.tensor([0.0, *numbers], dtype=torch.float32).double().to(DEVICE)[1:]  # aligned to 8 bytes
        taken, block = torch.tensor([live], device=DEVICE), draws.randrange(3)
        results = [
            version.weigh(coeffs, taken, table, block)
            for version, table in zip((kernel, reference), tables, strict=True)
        ]
        assert bits(results[0]) == bits(results[1])
        assert bits(tables[0]) == bits(tables[1])
        if live:
            assert results[0].tolist() == rule.weigh(coeffs.tolist(), host, block)
        assert tables[0].tolist() == host


@pytest.mark.gpu
@pytest.mark.parametrize("probes", [1, 3, 8, 24])
def test_the_rule_takes_any_number_of_probes(probes: int) -> None:
    rule, host = zb.Normalized(), [[0.0, 0.0] for _ in range(3)]
    table = torch.zeros(3, 2, dtype=torch.float64, device="cuda")
    for _ in range(10):
        coeffs = torch.randn(probes).double()
        got = rule.weigh_on_device(coeffs.cuda(), torch.tensor([True], device="cuda"), table, 1)
        assert got.tolist() == rule.weigh(coeffs.tolist(), host, 1)
        assert table.tolist() == host
