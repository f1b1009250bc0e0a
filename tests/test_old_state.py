"""State dicts that zeroblock 0.1.0 saved still continue, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zeroblock as zb
from toy import Tiny, same, snapshot

STATES: dict[str, dict[str, Any]] = torch.load(
    Path(__file__).parent / "fixtures" / "states_0_1.pt", weights_only=True, map_location="cpu"
)


@pytest.mark.parametrize("name", STATES)
def test_a_state_of_0_1_continues(name: str) -> None:
    """Steps 11 to 23, taken from their records: no loss is measured, so that no library can change the result."""
    saved = STATES[name]
    model = Tiny(dtype=next(iter(saved["weights"].values())).dtype)
    with torch.no_grad():
        for key, param in model.named_parameters():
            param.copy_(saved["weights"][key])
    optimizer = zb.METHODS[saved["method"]](model, seed=5, **saved["options"])
    optimizer.weights.initial.clear()  # a state brings what Sparse knew of the first weights
    optimizer.load_state_dict(saved["state"])
    zb.replay(optimizer, [zb.Record(*record) for record in saved["records"]])
    assert same(snapshot(model), saved["end"])
