"""A model whose layers lie on two devices of one process, as device_map places them: the forked pass crosses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoder import BATCH, LABELS, decoder
from torch import nn

from toy import bits
from zeroblock.engine import Engine
from zeroblock.method import METHODS


def moved(value: Any, device: torch.device) -> Any:
    """The same on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(one, device) for one in value)
    return value


def placed(model: nn.Module, devices: tuple[str, str]) -> nn.Module:
    """Every other layer on another device, and hooks that move what a layer is given to where it lies."""
    for i, module in enumerate([*model.model.layers, model.model.norm, model.lm_head]):
        device = torch.device(devices[i % 2])

        def hook(module: nn.Module, args: Any, kwargs: Any, device: torch.device = device) -> Any:
            return moved(args, device), {name: moved(value, device) for name, value in kwargs.items()}

        module.to(device).register_forward_pre_hook(hook, with_kwargs=True)
    return model


@pytest.mark.parametrize("devices", [("cpu", "cpu"), pytest.param(("cpu", "cuda"), marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("name", ["mezo", "mezo_bcd", "lozo", "mezo_bcd_adam"])
def test_the_forked_pass_crosses_devices(name: str, devices: tuple[str, str]) -> None:
    """Blocks with tensors on both; given the same coefficients, the weights are those of one device, to the bit.

    Without a GPU both are the CPU, and only the engine takes them for two: hooks and all take the same way.
    """
    models = [decoder("llama"), placed(decoder("llama"), devices)]
    engines = [Engine(model) for model in models]
    engines[1].devices = set(map(torch.device, ("cpu", "cuda")))
    objectives = [engine.objective(BATCH, LABELS) for engine in engines]
    optimizers = [METHODS[name](model, lr=1e-2) for model in models]
    for step in range(4):
        here, there = (optimizer.plan() for optimizer in optimizers)
        losses = objectives[0].measure(here.points), objectives[1].measure(there.points)
        assert torch.allclose(*losses, atol=1e-3), step
        for optimizer in optimizers:
            optimizer.step(iter([1.0, 1.0 + 0.002 * (step + 1)]).__next__)
    assert engines[1].forked
    assert not engines[1].reason
    if name != "mezo_bcd_adam":
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(bits(ours), bits(theirs))
