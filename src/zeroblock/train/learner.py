"""Learners take the steps: zeroth-order methods, and backpropagation beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from ..closure import Closure
from ..errors import ZeroBlockError
from ..journal import Record
from ..optimizer import ZeroOrder
from ..step import Mean
from . import snapshot
from .compose import optimizer
from .config import BACKPROPAGATION, Config

Listener = Callable[[Record], None]


class Learner(Protocol):
    """Moves the weights and reports every step to its listener, in order."""

    blocks: tuple[str, ...]

    @property
    def steps(self) -> int:
        """The number of steps taken."""
        ...

    @property
    def batches(self) -> int:
        """How many batches the objective of the next step joins."""
        ...

    def step(self, objectives: Sequence[Closure], lr: float) -> None:
        """Take one step on the mean of the objectives, one per micro-batch."""
        ...

    def share(self, parts: int) -> slice:
        """Which of a step's micro-batches this process measures.

        Args:
            parts: how many there are.
        """
        ...

    def agree(self) -> int:
        """Refuse ranks with different weights, by name; the checksum of the weights that all have."""
        ...

    def flush(self) -> None:
        """Wait until the listener has heard of every step taken."""
        ...

    def settle(self) -> None:
        """After the last step: write into the weights what was collected beside them."""
        ...

    def keep(self, folder: Path, tokenizer: Any) -> None:
        """Save the weights for ``from_pretrained``, unless the run can rebuild them.

        Args:
            folder: where they go, in place of those kept before.
            tokenizer: of the model.
        """
        ...


class ZerothOrder:
    """A zeroth-order method.

    Args:
        optimizer: takes the steps.
        listener: is called with every step.
    """

    def __init__(self, optimizer: ZeroOrder, listener: Listener) -> None:
        self.optimizer = optimizer
        self.blocks = tuple(block.name for block in optimizer.blocks)
        optimizer.listener = listener

    @property
    def steps(self) -> int:
        return int(self.optimizer.steps)

    @property
    def batches(self) -> int:
        return max(1, int(self.optimizer.anchoring))

    def step(self, objectives: Sequence[Closure], lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step(objectives[0] if len(objectives) == 1 else Mean(objectives))

    def share(self, parts: int) -> slice:
        if self.optimizer.team is None:
            return slice(None)
        ranks = self.optimizer.team.ranks
        at, rows = ranks.place[0], len(ranks.grid)
        return slice(parts * at // rows, parts * (at + 1) // rows)

    def agree(self) -> int:
        assert self.optimizer.team is not None
        return self.optimizer.team.agree(self.steps)

    def flush(self) -> None:
        self.optimizer.flush()

    def settle(self) -> None:
        self.optimizer.settle()

    def keep(self, folder: Path, tokenizer: Any) -> None:
        """The journal rebuilds the weights of any step."""


class Backpropagation:
    """AdamW on all trainable parameters, without dropout, as everywhere in zeroblock.

    Args:
        model: its trainable parameters move.
        weight_decay: decoupled, on all of them.
        listener: is called with every step.
    """

    def __init__(self, model: nn.Module, weight_decay: float, listener: Listener) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=weight_decay)
        self.blocks: tuple[str, ...] = ("whole",)
        self.steps = 0
        self.batches = 1
        self._listener = listener

    def step(self, objectives: Sequence[Closure], lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.zero_grad()
        loss = 0.0
        weights = Mean(objectives).amounts
        for objective, weight in zip(objectives, weights, strict=True):
            part = objective() * (weight / sum(weights))
            part.backward()
            loss += float(part.detach())
        if not math.isfinite(loss):
            raise ZeroBlockError(f"the loss of step {self.steps} is not finite: lower lr (try a tenth), or use fp32")
        self.optimizer.step()
        self._listener(Record(self.steps, 0, (), lr, (loss,), loss))
        self.steps += 1

    def share(self, parts: int) -> slice:
        return slice(None)

    def agree(self) -> int:
        return 0

    def flush(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def keep(self, folder: Path, tokenizer: Any) -> None:
        snapshot.save_model(folder, self.model, tokenizer, self.steps)


def learner(config: Config, model: nn.Module, listener: Listener) -> Learner:
    """Build the learner of a configuration."""
    if config.method == BACKPROPAGATION:
        return Backpropagation(model, config.weight_decay, listener)
    return ZerothOrder(optimizer(config, model, parallel=_parallel(config)), listener)


def _parallel(config: Config) -> str:
    """What the ranks share; one process alone joins nobody, but measures shared probes as several ranks would."""
    up = dist.is_available() and dist.is_initialized()
    joins = up and (dist.get_world_size() > 1 or "probes" in (config.parallel or ""))
    return config.parallel if joins and config.parallel else "auto"
