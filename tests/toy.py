"""Small models and measurements that the tests share."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PATIENCE_S = 900
"""Seconds after which a test gives up on another process: far longer than a busy machine needs, so a hang only."""


class Tiny(nn.Module):
    """A language model in miniature: embedding, layers, norm, tied head, odd sizes."""

    def __init__(self, width: int = 6, depth: int = 3, vocabulary: int = 7, tied: bool = True, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(width), "up": nn.Linear(width, 5), "down": nn.Linear(5, width)})
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, p in self.named_parameters():
            if "norm" not in name:
                p.data = torch.randn(p.shape, generator=generator) * 0.3
        if tied:
            self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for layer in self.layers:
            h = h + layer["down"](torch.tanh(layer["up"](layer["norm"](h))))
        return self.head(self.norm(h))


def next_token(model: nn.Module, vocabulary: int = 7) -> Callable[[], Tensor]:
    """Cross-entropy of predicting each token's successor."""
    tokens = torch.arange(vocabulary, device=next(model.parameters()).device)
    return lambda: nn.functional.cross_entropy(model(tokens).float(), tokens.roll(-1))


def distance(model: nn.Module) -> Callable[[], Tensor]:
    """½‖θ - θ*‖²: a quadratic with a known gradient."""
    generator = torch.Generator().manual_seed(1)
    goals = [(p, torch.randn(p.shape, generator=generator).to(p)) for p in model.parameters()]
    return lambda: sum(((p - g).double() ** 2).sum() for p, g in goals) / 2


def bits(x: Tensor) -> Tensor:
    """The integers behind floats: equality to the bit, NaNs and signed zeros included."""
    return x.detach().cpu().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(bits(a[n]), bits(b[n])) for n in a)


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes of CPU tensors alive at once, above what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        run()
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def zeroblock(*words: object) -> subprocess.CompletedProcess[str]:
    """The command line as a shell runs it, in this process, which has its imports: a tenth of the time."""
    from zeroblock.cli import main

    argv, out, err, code = sys.argv, io.StringIO(), io.StringIO(), 0
    sys.argv = ["zeroblock", *map(str, words)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.resetwarnings()  # pytest's are not a user's
            main()
    except SystemExit as left:
        code = left.code
    finally:
        sys.argv = argv
    return subprocess.CompletedProcess(sys.argv, code, out.getvalue(), err.getvalue())
