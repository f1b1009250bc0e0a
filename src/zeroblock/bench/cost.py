"""The time of a step by block: timed, and as the cost model predicts it from a few of the blocks."""

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
        tokens: of a batch in a packed row.
        block: index of the block.
        name: of the block.
        prefix: share of the layers that run before it.
        weights: number of its weights.
        held: whether the hidden states before the block were held from the step before.
        fitted: whether the prediction was fitted to this block, too.
        median_ms: of the block's steps; on the CPU of processor time.
        predicted_ms: by the cost model.
        error: of the prediction, as a fraction of the median.
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
    """A function that takes a step on a block, puts its weights back, and says how many seconds the step took.

    On the CPU these are seconds of processor time, which other processes do not lengthen.

    Args:
        optimizer: takes the steps.
        objective: what they measure.
        held: take two steps on the block, of which the second counts.
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
    """The costs of an optimizer's blocks, from timed steps on a few of them; the weights come out as they were.

    Args:
        optimizer: of several blocks; one that nothing else uses, because it takes steps.
        objective: what its steps measure.
        rounds: steps that are timed per block.
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
        model: on its device, in its dtype; its weights come out as they were.
        pool: the examples, of which the first batch is taken.
        names: of model and task, for the rows.
        method: of blocks.
        batch_size: examples per step.
        rounds: steps that are timed per block.
        graphs: whether to capture steps; by default where it pays.
        hold: time steps whose prefix is held, too; they are not captured.
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
