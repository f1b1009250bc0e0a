"""Learners: what takes a step. Zeroth-order methods, and backpropagation beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from ..errors import ZeroBlockError
from ..journal import Record
from ..optimizer import Closure, ZeroOrder
from .compose import optimizer
from .config import BACKPROPAGATION, Config

Listener = Callable[[Record], None]


class Learner(Protocol):
    """Moves the weights, and tells its listener of every step, in order."""

    blocks: tuple[str, ...]

    @property
    def steps(self) -> int:
        """Steps taken."""
        ...

    def step(self, closures: Sequence[Closure], lr: float) -> None:
        """Take one step on the mean of the closures' losses, one a micro-batch."""
        ...

    def flush(self) -> None:
        """Wait until the listener has heard of every step taken."""
        ...

    def settle(self) -> None:
        """After the last step: leave nothing of it outside the weights."""
        ...


class ZerothOrder:
    """A method of the table.

    Args:
        optimizer: of the method.
        listener: hears of every step.
    """

    def __init__(self, optimizer: ZeroOrder, listener: Listener) -> None:
        self.optimizer = optimizer
        self.blocks = tuple(block.name for block in optimizer.blocks)
        optimizer.listener = listener

    @property
    def steps(self) -> int:
        return self.optimizer.steps

    def step(self, closures: Sequence[Closure], lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step(closures[0] if len(closures) == 1 else closures)

    def flush(self) -> None:
        self.optimizer.flush()

    def settle(self) -> None:
        self.optimizer.settle()


class Backpropagation:
    """Adam with decoupled weight decay, dropout off as everywhere here.

    Args:
        model: whose trainable parameters it moves.
        weight_decay: on all of them.
        listener: hears of every step.
    """

    def __init__(self, model: nn.Module, weight_decay: float, listener: Listener) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=weight_decay)
        self.blocks: tuple[str, ...] = ("whole",)
        self.steps = 0
        self._listener = listener

    def step(self, closures: Sequence[Closure], lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.zero_grad()
        loss = 0.0
        for closure in closures:
            part = closure() / len(closures)
            part.backward()
            loss += float(part.detach())
        if not math.isfinite(loss):
            raise ZeroBlockError(f"the loss of step {self.steps} is not finite: lower lr (try a tenth), or use fp32")
        self.optimizer.step()
        self._listener(Record(self.steps, 0, (), lr, (loss,), loss))
        self.steps += 1

    def flush(self) -> None:
        pass

    def settle(self) -> None:
        pass


def learner(config: Config, model: nn.Module, listener: Listener) -> Learner:
    """What takes the steps of a configuration."""
    if config.method == BACKPROPAGATION:
        return Backpropagation(model, config.weight_decay, listener)
    return ZerothOrder(optimizer(config, model), listener)
