"""Ceilings: how fast this machine multiplies the model's own matrices and copies memory, and the floors they set.

A floor is the time a step would take if it did nothing but its products with the weights
(without attention's own products, norms and noise), or nothing but the reads and writes that
perturbation and update cannot avoid.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..block import Block, stacks

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
"""Bytes copied to measure the bandwidth: far more than any cache holds."""
MIN_MEASURED_MS = 100


class Ceiling:
    """The speed at which this machine computes the products of a model.

    Args:
        model: a causal language model with a ``ModuleList`` of layers, on its device.
    """

    def __init__(self, model: nn.Module) -> None:
        stack = [layer for path in stacks(model) for layer in model.get_submodule(path).children()]
        self.layer = {id(p): i for i, layer in enumerate(stack) for p in layer.parameters()}
        # parameters, not their storage: a published procedure replaces the storage at every pass
        self.matrices = [[p for p in layer.parameters() if p.dim() == 2] for layer in stack]
        self.plain = bool(stack) and all(p.dim() <= 2 for layer in stack for p in layer.parameters())
        outputs: Any = getattr(model, "get_output_embeddings", lambda: None)()
        self.head: nn.Parameter | None = getattr(outputs, "weight", None)
        self.params = dict(model.named_parameters())
        first = next(iter(self.params.values()))
        self.device, self.dtype = first.device, first.dtype
        self._times: dict[tuple[str, int], float] = {}
        self._bandwidth: float | None = None

    def layers_ms(self, rows: int) -> float:
        """Milliseconds of the products of all layers with that many rows."""
        return self._measured("layers", rows, [w for layer in self.matrices for w in layer])

    def head_ms(self, rows: int) -> float:
        """Milliseconds of the head's product with that many rows."""
        return 0.0 if self.head is None else self._measured("head", rows, [self.head])

    def padded_ms(self, rows: int) -> float | None:
        """Milliseconds of two forwards of padded rows with logits at every position: the published step."""
        return 2 * (self.layers_ms(rows) + self.head_ms(rows)) if self.plain else None

    def packed_ms(self, rows: int, positions: int) -> float | None:
        """Milliseconds of two forwards of the packed row, one after the other."""
        return 2 * (self.layers_ms(rows) + self.head_ms(positions)) if self.plain else None

    def forked_ms(self, rows: int, positions: int, blocks: Sequence[Block], *, shared: bool = False) -> float | None:
        """Milliseconds of the forked step, averaged over blocks.

        It runs S rows before the active block, twice S rows in it, and 2S rows at once after it.

        Args:
            rows: S, the number of tokens of the packed row.
            positions: number of them that carry loss.
            blocks: the blocks that take turns.
            shared: whether both sides go through one product in the block too (low rank).
        """
        if not self.plain:
            return None
        depth = len(self.matrices)
        once, both = self.layers_ms(rows) / depth, self.layers_ms(2 * rows) / depth
        total, passed = 0.0, False
        for block in blocks:
            params = [self.params[name] for name in block.params]
            active = {self.layer[id(p)] for p in params if id(p) in self.layer}
            passed = passed or bool(active)
            before = min(active, default=depth if passed else 0)
            total += before * once + (depth - before - len(active)) * both
            total += len(active) * (both if shared else 2 * once)
            apart = any(p is self.head for p in params) and not shared
            total += 2 * self.head_ms(positions) if apart else self.head_ms(2 * positions)
        return total / len(blocks)

    def copy_ms(self, nbytes: float) -> float:
        """Milliseconds to move this many bytes, reads and writes counted together."""
        if self._bandwidth is None:
            x = torch.ones(COPY_BYTES[self.device.type] // 4, device=self.device)
            y = torch.empty_like(x)
            self._bandwidth = 2 * x.nbytes / self._ms(lambda: y.copy_(x))
        return nbytes / self._bandwidth

    def _measured(self, name: str, rows: int, weights: Sequence[nn.Parameter]) -> float:
        """Milliseconds of x Wᵀ for all the weights in turn, so that none is still in a cache."""
        if (name, rows) not in self._times:
            inputs = {w.shape[1]: torch.randn(rows, w.shape[1], device=self.device, dtype=self.dtype) for w in weights}
            outputs = {w.shape[0]: torch.empty(rows, w.shape[0], device=self.device, dtype=self.dtype) for w in weights}

            def products() -> None:
                for w in weights:
                    torch.mm(inputs[w.shape[1]], w.t(), out=outputs[w.shape[0]])

            self._times[name, rows] = self._ms(products)
        return self._times[name, rows]

    @torch.no_grad()
    def _ms(self, run: Callable[[], object]) -> float:
        """Median milliseconds of a call; on a GPU, of its CUDA graph, so that the host does not slow it down."""
        run()
        if self.device.type != "cuda":
            times: list[float] = []
            while len(times) < 2 or sum(times) < MIN_MEASURED_MS:
                begin = time.perf_counter()
                run()
                times.append(1e3 * (time.perf_counter() - begin))
            return statistics.median(times)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
        graph.replay()
        for mark in marks:
            mark.record()
            graph.replay()
        torch.cuda.synchronize()
        return statistics.median(float(a.elapsed_time(b)) for a, b in itertools.pairwise(marks))
