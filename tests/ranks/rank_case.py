"""Cases that the tests run in every rank of a pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pool import group, ranks
from torch import Tensor, nn

import zeroblock as zb
from toy import Tiny, snapshot
from zeroblock.method import METHODS

STEPS = 9
Outcome = tuple[dict[str, Tensor], list[zb.Record]]


class Batch:
    """An objective with data of its own, which knows the number of things that it is a mean over."""

    def __init__(self, model: nn.Module, number: int, amount: float | None = None) -> None:
        generator = torch.Generator().manual_seed(number)
        self.tokens = torch.randint(0, 7, (5,), generator=generator)
        self.model, self.amount = model, amount

    def __call__(self) -> Tensor:
        return nn.functional.cross_entropy(self.model(self.tokens).float(), self.tokens.roll(-1))


def weighted(batch: Batch) -> zb.step.Objective:
    """The batch as an objective with a weight."""
    from zeroblock.step import Called

    class Weighted(Called):
        weight = property(lambda self: ("tokens", batch.amount))

    return Weighted(batch)


def build(name: str, model: nn.Module, **options: Any) -> zb.ZeroOrder:
    if name in ("lozo", "lozo_m", "mezo_bcd_adam"):
        options = {"interval": 4, **options}
    return METHODS[name](model, lr=5e-3, **options)


def trained(
    name: str,
    dtype: torch.dtype,
    batches: Callable[[nn.Module, int], Any],
    steps: int = STEPS,
    **options: Any,
) -> Outcome:
    """Weights and records of a run; ``batches`` gives the objective of a step."""
    model = Tiny(dtype=dtype)
    records: list[zb.Record] = []
    optimizer = build(name, model, **options)
    optimizer.listener = records.append
    for step in range(steps):
        optimizer.step(batches(model, step))
    return snapshot(model), records


def alone(name: str, dtype: torch.dtype, size: int, probes: int = 1, **options: Any) -> Outcome:
    """One process that has the micro-batches of ``size`` ranks."""
    return trained(name, dtype, lambda model, step: _batches(model, step, range(size)), probes=probes, **options)


def _batches(model: nn.Module, step: int, shares: Any) -> list[Batch]:
    return [Batch(model, 10 * step + share) for share in shares]


def by_data(name: str, dtype: torch.dtype, sizes: tuple[int, ...], **options: Any) -> dict[int, Outcome]:
    """Each rank has one micro-batch per step."""
    rank = dist.get_rank()
    return {
        size: trained(name, dtype, lambda model, step: Batch(model, 10 * step + rank), parallel=group(size), **options)
        for size in sizes
        if rank < size
    }


def by_probes(name: str, dtype: torch.dtype, sizes: tuple[int, ...], **options: Any) -> dict[int, Outcome]:
    """Each rank measures some of four probes."""
    return {
        size: trained(
            name, dtype, lambda model, step: Batch(model, 10 * step), probes=4, parallel=ranks(size, size), **options
        )
        for size in sizes
        if dist.get_rank() < size
    }
