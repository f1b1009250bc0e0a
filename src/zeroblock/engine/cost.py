"""The cost of a step by block: a model of its time with a few coefficients, which are fitted to some timed steps.

With block j active, the layers before it run once, and the block and everything after it run once per point; the
block's own weights take noise once per point and an update.  Everything else is the same for every block:

    seconds(j) = whole - saved·prefix(j) + noise·weights(j) + outer·outside(j)

``prefix`` is the share of the layers before the block, ``weights`` the number of its weights in layers, and ``outside``
the number of its other weights: a tied embedding takes its noise twice, for the embedding and for the head.  A step
that reuses the hidden states before the block from the last step (see ``held.py``) saves held·prefix(j) more.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..block import Block, stacks
from ..errors import ZeroBlockError
from ..family import is_output_side

TIMED_BLOCKS = 6
"""Number of blocks whose steps are timed to predict the cost of all blocks."""
ROUNDS = 5
"""Number of steps that are timed per block; their median counts."""


@dataclasses.dataclass(frozen=True)
class Work:
    """The part of a step's work that differs from block to block.

    Args:
        prefix: share of the layers, by their weights, that run before the block.
        weights: number of the block's weights in layers.
        outside: number of its other weights.
        held: whether the hidden states before the block are held from the last step.
    """

    prefix: float
    weights: int
    outside: int = 0
    held: bool = False


def works(model: nn.Module, blocks: Sequence[Block]) -> list[Work]:
    """The work of every block of a model."""
    params = dict(model.named_parameters())
    before: dict[str, int] = {}
    """For each parameter, the number of weights in the layers before it."""
    total = 0
    for stack in stacks(model):
        for name, layer in model.get_submodule(stack).named_children():
            path = f"{stack}.{name}." if stack else f"{name}."
            before |= {param: total for param in params if param.startswith(path)}
            total += sum(param.numel() for param in layer.parameters())
    inside, entered = set(before), False
    for name in params:  # outside the layers: before or after them, in the order in which the model registers them
        entered = entered or name in inside
        before.setdefault(name, total if entered or is_output_side(name) else 0)
    found = []
    for block in blocks:
        size = sum(params[name].numel() for name in block.params)
        layered = sum(params[name].numel() for name in block.params if name in inside)
        found.append(Work(min(before[name] for name in block.params) / max(1, total), layered, size - layered))
    return found


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds per step of any block.

    >>> costs = Costs(whole=1.0, saved=0.5, noise=1e-9)
    >>> costs.of(Work(prefix=0.5, weights=10_000_000))
    0.76

    Args:
        whole: seconds of a step whose active block is the first layer, without the block's noise.
        saved: seconds that a step saves if its prefix is all layers, because they run once.
        noise: seconds per weight of the block in layers.
        outer: seconds per other weight of the block.
        held: seconds that a step saves in addition if its prefix is all layers and is held.
    """

    whole: float
    saved: float
    noise: float
    outer: float = 0.0
    held: float = 0.0

    def of(self, work: Work) -> float:
        """The predicted seconds of a step."""
        saved = self.saved + (self.held if work.held else 0.0)
        return self.whole - saved * work.prefix + self.noise * work.weights + self.outer * work.outside

    @classmethod
    def fit(cls, work: Sequence[Work], seconds: Sequence[float]) -> Costs:
        """The costs with the least relative errors, by least squares.

        Args:
            work: the work of some blocks.
            seconds: the time that a step on each of them took.
        """
        if len(work) != len(seconds) or not work or min(seconds) <= 0:
            raise ZeroBlockError(f"costs need a positive time per block, got {len(seconds)} for {len(work)} blocks")
        scale = max(1, *(max(one.weights, one.outside) for one in work))  # so that all columns have similar magnitudes
        rows = [[1.0, -one.prefix, one.weights / scale, one.outside / scale, -one.prefix * one.held] for one in work]
        times = torch.tensor(seconds, dtype=torch.float64)[:, None]
        table = torch.tensor(rows, dtype=torch.float64) / times
        solved = torch.linalg.lstsq(table, torch.ones_like(times), driver="gelsd").solution  # 0 if undetermined
        whole, saved, noise, outer, held = solved[:, 0].tolist()
        return cls(whole, saved, noise / scale, outer / scale, held)


def sample(work: Sequence[Work], count: int = TIMED_BLOCKS) -> list[int]:
    """Blocks that together determine the costs: the largest, and others spread evenly from first to last."""
    n, count = len(work), min(count, len(work))
    spread = {round(i * (n - 1) / max(1, count - 1)) for i in range(count)}
    return sorted(spread | {max(range(n), key=lambda b: work[b].weights + work[b].outside)})


def timed(step: Callable[[int], float], blocks: Sequence[int], rounds: int = ROUNDS, warmup: int = 1) -> list[float]:
    """Median seconds of a step by block, in rounds over all blocks, so that a busy minute affects all alike.

    Args:
        step: takes a step on a block, waits for its end, and returns its seconds.
        blocks: the blocks to time.
        rounds: steps per block.
        warmup: steps per block that do not count: compilation, captures.
    """
    taken: list[list[float]] = [[] for _ in blocks]
    for turn in range(warmup + rounds):
        for i, block in enumerate(blocks):
            seconds = step(block)
            if turn >= warmup:
                taken[i].append(seconds)
    return [statistics.median(each) for each in taken]


def relative(costs: Costs, work: Sequence[Work]) -> tuple[float, ...]:
    """The predicted cost of every block in units of the mean cost, to three digits and at least 0.1."""
    seconds = [costs.of(one) for one in work]
    mean = statistics.fmean(seconds)
    return tuple(float(f"{max(0.1, each / mean):.3g}") for each in seconds)
