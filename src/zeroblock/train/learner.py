"""Learners take the steps, by a zeroth-order method or by backpropagation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from ..closure import Closure
from ..errors import DivergenceError
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
        """The number of batches in the objective of the next step."""
        ...

    def step(self, objectives: Sequence[Closure], lr: float) -> None:
        """Take one step on the mean of the objectives, one per micro-batch."""
        ...

    def share(self, parts: int) -> slice:
        """The slice of a step's micro-batches that this process measures.

        Args:
            parts: the number of micro-batches.
        """
        ...

    def agree(self) -> int:
        """Return the checksum of the weights; an error names the ranks whose weights differ."""
        ...

    def flush(self) -> None:
        """Wait until the listener has been called for every step taken."""
        ...

    def settle(self) -> None:
        """After the last step, add the steps collected since the last fold to the weights."""
        ...

    def keep(self, folder: Path, tokenizer: Any) -> None:
        """Save the weights for ``from_pretrained``, unless the run can rebuild them.

        Args:
            folder: the folder to write, in place of earlier weights.
            tokenizer: the model's tokenizer.
        """
        ...


class ZerothOrder:
    """A zeroth-order method.

    Args:
        optimizer: takes the steps.
        listener: called with the record of every step.
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
        """Save nothing: the journal rebuilds the weights of any step."""


class Backpropagation:
    """AdamW on all trainable parameters, without dropout, as everywhere in zeroblock.

    Args:
        model: the model to train.
        weight_decay: decoupled weight decay, on all of them.
        listener: called with the record of every step.
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
            raise DivergenceError(f"the loss of step {self.steps} is not finite: lower lr (try a tenth), or use fp32")
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
    """The optimizer's ``parallel``; a single process joins no ranks, but measures shared probes as several would."""
    up = dist.is_available() and dist.is_initialized()
    joins = up and (dist.get_world_size() > 1 or "probes" in (config.parallel or ""))
    return config.parallel if joins and config.parallel else "auto"
