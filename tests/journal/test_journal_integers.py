"""The journal's page is enough for weights that are stored as integers, too."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import page_integers as page
import pytest
import torch
from journal_toy import build
from torch import nn

from toy import Tiny, next_token
from zeroblock.block import stacks
from zeroblock.journal import Header, Journal
from zeroblock.quantise import quantise_, quantised_layers

pytestmark = pytest.mark.filterwarnings("ignore::zeroblock.ZeroBlockWarning")  # one step is not finite on purpose


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        ("mezo_bcd", "int8", torch.float32),
        ("mezo", "int4", torch.bfloat16),
        ("zo_momentum", "int8", torch.float16),
        ("mezo_bcd_adam", "int4", torch.float32),
    ],
)
def test_integers_are_replayed_from_the_page(name: str, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = Tiny(width=64, dtype=dtype)
    base = {path: param.detach().float().numpy().copy() for path, param in model.named_parameters()}
    linears = [path for path, one in model.named_modules() if isinstance(one, nn.Linear) and "layers" in path]
    quantise_(model, kind)
    optimizer, loss, path = build(name, model, weight_decay=0.05, probes=2), next_token(model), tmp_path / "run.zbj"
    with Journal.create(path, Header.of(optimizer, weights=kind), fsync=None) as journal:
        for step in range(10):
            optimizer.step((lambda: math.nan) if step == 3 else loss)
            journal.append(optimizer.record)
    found = page.weights_of(path.read_bytes(), base, stacks(model), linears, str(dtype)[6:])
    layers = {f"{one}.weight": layer for one, layer in quantised_layers(model).items()}
    assert len(layers) == (6 if kind == "int8" else 3)
    moved = 0
    assert list(found) == [one for one, _ in model.named_parameters()]
    for one, param in model.named_parameters():
        integers = layers[one].kind.unpacked(param) if one in layers else param
        expected = integers.detach().float().numpy()
        exact = one in layers or name in ("mezo_bcd", "mezo")
        np.testing.assert_allclose(
            found[one], expected, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-7, err_msg=one
        )
        if one in layers:
            moved += int((page.stored(base[one], layers[one].kind.limit, str(dtype)[6:])[0] != expected).sum())
    assert moved >= 20
