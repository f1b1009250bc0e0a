"""The same bits on another device."""

from __future__ import annotations

import pytest
import torch

import zeroblock as zb
from toy import DTYPES, Tiny, next_token, same, snapshot
from zeroblock.method import METHODS
from zeroblock.rule import SGD
from zeroblock.run import host
from zeroblock.step import Called

pytestmark = pytest.mark.gpu
EXACT = [name for name, build in METHODS.items() if isinstance(build(Tiny(), lr=0.0).rule, SGD) and name != "subzero"]
"""SubZero's frames come from a library's QR decomposition."""


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_run_on_the_gpu_replays_on_the_cpu_to_the_bit(name: str, dtype: torch.dtype) -> None:
    """SGD's steps use nothing but the specified arithmetic, so the journal is portable between devices."""
    there = Tiny(dtype=dtype).cuda()
    optimizer = METHODS[name](there, lr=1e-2, weight_decay=0.01, probes=2)
    records = []
    for _ in range(20):
        optimizer.step(next_token(there))
        records.append(optimizer.record)
    here = Tiny(dtype=dtype)
    zb.replay(METHODS[name](here, lr=1e-2, weight_decay=0.01, probes=2), records)
    assert same(snapshot(here), snapshot(there))
    assert not same(snapshot(here), snapshot(Tiny(dtype=dtype)))


@pytest.mark.parametrize("name", METHODS)
def test_losses_agree_between_devices(name: str) -> None:
    here, there = Tiny(), Tiny().cuda()
    a, b = METHODS[name](here, lr=1e-3), METHODS[name](there, lr=1e-3)
    for _ in range(10):
        assert float(a.step(next_token(here))) == pytest.approx(float(b.step(next_token(there))), rel=1e-4)


EXTRA_LAYERS = {
    "conmezo": 1.7,
    "hizoo": 1.7,  # noise is shaped in fp32, piece by piece
    "lezo": 2,  # two of the eight layers move in a step
    "subzero": 3,  # U·z·Vᵀ of one matrix in fp32 beside its copy
    "zo_muon": 2.6,
}
"""Layers whose size a measurement needs at most, where it is not one."""
EXTRA_BYTES = {"conmezo": 1 << 25}
"""Bytes that do not grow with the layers: the norm of a momentum is summed in fp64, four million numbers at a time."""


@pytest.mark.parametrize("name", METHODS)
def test_extra_memory_on_the_gpu(name: str) -> None:
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Linear(2048, 2048, bias=False) for _ in range(8))
    model.half().cuda()
    x = torch.randn(1, 2048, device="cuda", dtype=torch.float16)

    def loss() -> torch.Tensor:
        h = x
        for layer in model.layers:
            h = torch.tanh(layer(h))
        return h.float().square().mean()

    optimizer = METHODS[name](model, lr=0.0, interval=1)
    optimizer.step(loss)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    host.measure(optimizer.plan(), Called(loss))
    layer = 2048 * 2048 * 2
    allowed = EXTRA_BYTES.get(name, 0) + (EXTRA_LAYERS.get(name, 1) + 0.3) * layer
    assert torch.cuda.max_memory_allocated() - before < allowed
