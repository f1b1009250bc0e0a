"""The same on a GPU: copies on streams of their own, from pinned memory and from a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_streamed import build, lozo, steps

import zeroblock as zb
from toy import same, snapshot


@pytest.mark.gpu
@pytest.mark.parametrize("to", ["host", "disk"])
@pytest.mark.parametrize("method", [zb.mezo_bcd, zb.mezo, lozo, zb.mezo_bcd_adam])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_streamed_equals_resident_on_a_gpu(
    to: Any, method: Callable[..., zb.ZeroOrder], dtype: torch.dtype, tmp_path: Path
) -> None:
    known, model = build("opt", dtype).cuda(), build("opt", dtype)
    expected = steps(known, method(known, lr=1e-2), 6)
    shelf = zb.shelve(model, to, device="cuda", folder=tmp_path)
    assert shelf.streams
    records = steps(model, method(model, lr=1e-2), 6)
    assert [(r.losses, r.coeffs) for r in records] == [(r.losses, r.coeffs) for r in expected]
    assert same(snapshot(model), snapshot(known))
    again = build("opt", dtype)
    zb.shelve(again, to, device="cuda", folder=tmp_path)
    zb.replay(method(again, lr=1e-2), records)
    assert same(snapshot(again), snapshot(model))
