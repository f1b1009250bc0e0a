"""The time of a step by block: measured, and predicted by the cost model from a few of the blocks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..closure import Closure
from ..engine import Engine
from ..engine.cost import ROUNDS, Costs, sample, timed, works
from ..method import get
from ..optimizer import ZeroOrder
from . import host
from .batch import Pool
from .row import Row

GPU_WARMUP = 3
"""Steps per block on a GPU before the clock is read: kernels are compiled, and steps captured."""


@dataclass(frozen=True, kw_only=True)
class CostRow(Row):
    """The time of a step on one block.

    Args:
        tokens: packed tokens of the batch.
        block: index of the block.
        name: name of the block.
        prefix: share of the layers that run before the block.
        weights: number of its weights.
        held: whether the hidden states before the block were held from the previous step.
        fitted: whether the prediction was fitted to this block, too.
        median_ms: median time of the block's steps; on the CPU, processor time.
        predicted_ms: the time that the cost model predicts.
        error: error of the prediction, as a fraction of the median.
    """

    tokens: int
    block: int
    name: str
    prefix: float
    weights: int
    held: bool
    fitted: bool
    median_ms: float
    predicted_ms: float
    error: float
    command: ClassVar[str] = "cost"


def stepper(optimizer: ZeroOrder, objective: Closure | Sequence[Closure], held: bool = False) -> Callable[[int], float]:
    """A function that takes a step on a block, restores its weights, and returns the seconds of the step.

    On the CPU these are seconds of processor time, which other processes do not lengthen.

    Args:
        optimizer: takes the steps.
        objective: the objective of the steps.
        held: take two steps on the block and count only the second.
    """
    on_gpu = next(iter(optimizer.params.values())).is_cuda
    clock = time.perf_counter if on_gpu else time.process_time

    def step(block: int) -> float:
        seconds = 0.0
        for _ in range(2 if held else 1):
            optimizer.enter(dataclasses.replace(optimizer.turn, block=block, weight=1.0, others=()))
            members = optimizer.members
            kept = [member.param.detach().clone() for member in members]
            if on_gpu:
                torch.cuda.synchronize()
            begin = clock()
            optimizer.step(objective)
            optimizer.flush()
            if on_gpu:
                torch.cuda.synchronize()
            seconds = clock() - begin
            with torch.no_grad():
                for member, before in zip(members, kept, strict=True):
                    member.param.copy_(before)
        return seconds

    return step


def measured(optimizer: ZeroOrder, objective: Closure | Sequence[Closure], rounds: int = ROUNDS) -> Costs:
    """The costs of an optimizer's blocks, from timed steps on a few of them; the weights are restored.

    Args:
        optimizer: an optimizer of several blocks that nothing else uses, because it takes steps.
        objective: the objective of its steps.
        rounds: number of timed steps per block.
    """
    work = works(optimizer.model, optimizer.blocks)
    chosen = sample(work)
    seconds = timed(stepper(optimizer, objective), chosen, rounds, _warmup(optimizer))
    return Costs.fit([work[block] for block in chosen], seconds)


def table(
    model: nn.Module, pool: Pool, names: tuple[str, str], method: str = "mezo_bcd", batch_size: int = 16,
    rounds: int = ROUNDS, graphs: bool | None = None, hold: bool = False,
) -> list[CostRow]:  # fmt: skip
    """Time a step on every block, and predict all from a few.

    Args:
        model: the model, on its device and in its dtype; its weights are restored.
        pool: the examples; the first batch is used.
        names: names of model and task, for the rows.
        method: a method with blocks.
        batch_size: examples per step.
        rounds: number of timed steps per block.
        graphs: whether to capture steps; by default where it pays.
        hold: also time steps with a held prefix; no step is captured then.
    """
    engine = Engine(model, graphs=False if hold else graphs, hold=hold)
    batch = pool.batch(0, batch_size)
    objective = engine.objective(batch.encoded, batch.labels, over=batch.over)
    optimizer = get(method)(model, lr=0.0)
    work, seconds = [], []
    for held in (False, True) if hold else (False,):
        work += [dataclasses.replace(one, held=held) for one in works(model, optimizer.blocks)]
        each = range(len(optimizer.blocks))
        seconds += timed(stepper(optimizer, objective, held), each, rounds, _warmup(optimizer))
    few = sample(work[: len(optimizer.blocks)])
    chosen = [i for i in range(len(work)) if i % len(optimizer.blocks) in few]
    costs = Costs.fit([work[i] for i in chosen], [seconds[i] for i in chosen])
    param = next(model.parameters())
    common: dict[str, Any] = {
        "model": names[0], "task": names[1], "method": method, "device": param.device.type,
        "dtype": str(param.dtype).removeprefix("torch."), "batch_size": batch_size,
        "tokens": sum(row.tokens.numel() for row, _ in objective.rows), **host.stamp(param.device.type),
    }  # fmt: skip
    return [
        CostRow(
            **common, block=i % len(optimizer.blocks), name=optimizer.blocks[i % len(optimizer.blocks)].name,
            prefix=round(one.prefix, 4), weights=one.weights + one.outside, held=one.held,
            fitted=i in chosen, median_ms=round(1e3 * took, 3), predicted_ms=round(1e3 * costs.of(one), 3),
            error=round(costs.of(one) / took - 1, 4),
        )
        for i, (one, took) in enumerate(zip(work, seconds, strict=True))
    ]  # fmt: skip


def text(rows: Sequence[CostRow]) -> str:
    """The rows as lines, with the largest error at the end."""
    lines = [f"{'block':<24} {'median':>10} {'predicted':>10} {'error':>7}"]
    for row in rows:
        times = f"{row.median_ms:>7.1f} ms {row.predicted_ms:>7.1f} ms {100 * row.error:>+6.1f} %"
        lines.append(f"{row.name[-24:]:<24} {times}{'  fitted' if row.fitted else ''}{'  held' if row.held else ''}")
    worst = max(rows, key=lambda row: abs(row.error))
    lines.append(f"the largest error is {100 * abs(worst.error):.1f} %, of {worst.name}")
    return "\n".join(lines)


def _warmup(optimizer: ZeroOrder) -> int:
    return GPU_WARMUP if next(iter(optimizer.params.values())).is_cuda else 1
