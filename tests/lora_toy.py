"""A toy of two layers with LoRA, whose weights no generator draws; ``fixtures/lora`` holds journals of it.

``python tests/lora_toy.py FOLDER`` wrote them with the code of 2026-11-18, before the size of LoRA's B followed
from the matrix beside it.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn

import zeroblock as zb
from zeroblock.journal import Header, Journal

STEPS = 12
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
METHODS = ("mezo_bcd", "fzoo_bcd")


class Layer(nn.Module):
    """A matrix that has an adapter beside it and one that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(12, 8), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.o(torch.tanh(self.q(x)))


class Toy(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def ruled_(param: Tensor, place: int, share: float = 1.0) -> None:
    """Fill a tensor with numbers that follow from their places."""
    k = torch.arange(param.numel(), dtype=torch.int64)
    values = ((7919 * k + 104_729 * place) % 2003 - 1001).double() / 4096
    param.data = (share * values).view(param.shape).to(param.dtype)


def adapted(dtype: torch.dtype = torch.float32, base: nn.Module | None = None, **options: Any) -> nn.Module:
    """The toy with LoRA on its layers' ``q``; B is zero."""
    config: Any = {"r": 4, "lora_alpha": 16, "target_modules": ["q"], **options}
    model = peft.get_peft_model(base or Toy().to(dtype), peft.LoraConfig(**config)).eval()  # type: ignore[arg-type]
    for place, (name, param) in enumerate(model.named_parameters()):
        if "lora_B" not in name:
            ruled_(param, place)
    return model


def loss(model: nn.Module) -> float:
    """A smooth function of every trainable weight and of the layers' products, in double precision."""
    total = 0.0
    for place, param in enumerate(p for p in model.parameters() if p.requires_grad):
        for k, value in enumerate(param.detach().double().reshape(-1).tolist()):
            total += (value - math.sin(k + 3.0 * place)) ** 2 / 2
    return total


def digest(model: nn.Module) -> str:
    """A fingerprint of all weights."""
    sha = hashlib.sha256()
    for param in model.parameters():
        sha.update(param.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def built(method: str, model: nn.Module) -> zb.ZeroOrder:
    """An optimizer without a learning rate."""
    optimizer: zb.ZeroOrder = zb.METHODS[method](model, steps=STEPS, seed=7)
    return optimizer


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    digests = {}
    for method in METHODS:
        for name, dtype in DTYPES.items():
            model = adapted(dtype)
            optimizer = built(method, model)
            with Journal.create(folder / f"{method}.{name}.zbj", Header.of(optimizer)) as writer:
                optimizer.listener = writer.append
                for _ in range(STEPS):
                    optimizer.step(lambda model=model: loss(model))
            digests[f"{method}.{name}"] = digest(model)
    folder.joinpath("weights.json").write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
