"""The same on a GPU: copies on streams of their own, from pinned memory and from a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder import BATCH, LABELS
from test_streamed import build, lozo, steps
from torch import nn

import zeroblock as zb
from toy import same, snapshot
from zeroblock.bench.stream import shelved
from zeroblock.engine import Engine
from zeroblock.offload import divide
from zeroblock.task.encoding import Encoded

pytestmark = pytest.mark.gpu


def submitted(model: nn.Module, optimizer: zb.ZeroOrder, count: int) -> list[zb.Record]:
    """The records of steps that run kernel by kernel, as those of streamed weights do: captured ones have the same
    rows, and losses that may differ in their last bits."""
    records: list[zb.Record] = []
    engine, optimizer.listener = Engine(model), records.append
    assert engine.graphs is not None
    engine.graphs.reason = "they are compared with steps that cannot be captured"
    for step in range(count):
        optimizer.step(engine.objective(BATCH[step % 2 :], LABELS[step % 2 :]))
    optimizer.flush()
    return records


@pytest.mark.parametrize("to", ["host", "disk"])
@pytest.mark.parametrize("method", [zb.mezo_bcd, zb.mezo, lozo, zb.mezo_bcd_adam])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_streamed_equals_resident_on_a_gpu(
    to: Any, method: Callable[..., zb.ZeroOrder], dtype: torch.dtype, tmp_path: Path
) -> None:
    known, model = build("opt", dtype).cuda(), build("opt", dtype)
    expected = submitted(known, method(known, lr=1e-2), 6)
    shelf = zb.shelve(model, to, device="cuda", folder=tmp_path)
    assert shelf.streams
    records = steps(model, method(model, lr=1e-2), 6)
    assert [(r.losses, r.coeffs) for r in records] == [(r.losses, r.coeffs) for r in expected]
    assert same(snapshot(model), snapshot(known))
    again = build("opt", dtype)
    zb.shelve(again, to, device="cuda", folder=tmp_path)
    zb.replay(method(again, lr=1e-2), records)
    assert same(snapshot(again), snapshot(model))


@pytest.mark.parametrize("method", [zb.mezo_bcd, zb.mezo])
def test_the_longest_row_fits_into_the_memory(method: Callable[..., zb.ZeroOrder]) -> None:
    """Weights, copies, activations and buffers as they were divided, none of them beside the count."""
    device, memory = torch.device("cuda", torch.cuda.current_device()), int(0.5e9)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model, shelf, division = shelved("opt-125m", torch.float16, device, "host", memory)
    assert division == divide(model, memory)
    assert not shelf.lane._stages  # pinned where it rests
    words = tuple(5 + i % 1000 for i in range(256))
    batch = [Encoded(words, ((7,), (8,)))] * (division.tokens // 260)
    engine, optimizer = Engine(model, max_tokens=division.tokens), method(model, lr=1e-6)
    for _ in range(len(optimizer.blocks)):
        optimizer.step(engine.objective(batch, [0] * len(batch)))
    assert torch.cuda.max_memory_allocated() - before <= memory
