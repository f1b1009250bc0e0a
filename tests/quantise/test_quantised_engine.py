"""Integers in the packed, forked engine: the losses are those of one point after another."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import peft
import pytest
import torch

import zeroblock as zb
from zeroblock.engine import Engine
from zeroblock.quantise import quantise_, quantised_layers

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from decoder import BATCH, LABELS, decoder


@pytest.mark.parametrize(("name", "kind"), [("llama", "int8"), ("opt", "int4"), ("qwen2", "int4")])
@pytest.mark.parametrize("method", ["mezo_bcd", "mezo"])
def test_forked_against_sequential(name: str, kind: str, method: str) -> None:
    model = decoder(name)
    quantise_(model, kind)
    assert len(quantised_layers(model)) >= 3 * 6
    twin = copy.deepcopy(model)
    fast, slow = getattr(zb, method)(model, 1e-2, 1e-2), getattr(zb, method)(twin, 1e-2, 1e-2)
    engine, plain = Engine(model), Engine(twin)
    assert engine.forked, engine.reason
    for _ in range(6):
        fast.step(engine.objective(BATCH, LABELS))
        objective = plain.objective(BATCH, LABELS)
        slow.step(lambda objective=objective: objective())
        torch.testing.assert_close(fast.record.losses, slow.record.losses, rtol=1e-5, atol=1e-5)
        with torch.no_grad():  # the last bit of a coefficient may round an integer up or down
            for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                theirs.copy_(ours)
    changed = [
        (a.weight.detach().view(torch.uint8) != b.weight.detach().view(torch.uint8)).float().mean()
        for a, b in zip(quantised_layers(model).values(), quantised_layers(decoded(name, kind)).values(), strict=True)
    ]
    assert any(share > 0 for share in changed)


def decoded(name: str, kind: str) -> torch.nn.Module:
    model = decoder(name)
    quantise_(model, kind)
    return model


def test_an_adapter_over_integers() -> None:
    """PEFT first, then the integers: only the adapter moves, and the base keeps its bytes."""
    model = peft.get_peft_model(decoder("llama"), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    quantise_(model, "int4")
    layers = quantised_layers(model)
    before = [layer.weight.detach().clone().view(torch.uint8) for layer in layers.values()]
    assert len(layers) == 3 * 7
    optimizer, engine = zb.mezo_bcd(model, 1e-2, 1e-2), Engine(model)
    assert all("lora_" in name for name in optimizer.params)
    losses = [optimizer.step(engine.objective(BATCH, LABELS)).item() for _ in range(4)]
    assert len(set(losses)) == 4
    assert all(
        torch.equal(a, b.weight.detach().view(torch.uint8)) for a, b in zip(before, layers.values(), strict=True)
    )
