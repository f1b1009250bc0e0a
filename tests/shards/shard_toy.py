"""A model small enough to shard in a test: layers with a forward of their own, odd sizes, biases, a tied head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 7


class Layer(nn.Module):
    """Norm, then up and down, beside the residual."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Toy(nn.Module):
    """7 words over 2 processes make an uneven shard, 3 rows over 4 an empty one."""

    def __init__(self, width: int = 6, inner: int = 3, depth: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width, inner) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(0)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator) * 0.3
        self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def objective(model: nn.Module, first: int = 0, count: int = VOCABULARY) -> Callable[[], Tensor]:
    """Cross-entropy of predicting the successor of some of the words."""
    tokens = torch.arange(first, first + count)
    return lambda: F.cross_entropy(model(tokens).float(), (tokens + 1) % VOCABULARY)
