"""Learners: what takes a step. Zeroth-order methods, and backpropagation beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ..block import by_name as partition_by_name
from ..errors import ZeroBlockError
from ..journal import Record
from ..method import METHODS, specimen
from ..noise import Rounding
from ..optimizer import ZeroOrder
from ..schedule import by_name as schedule_by_name
from ..step import Closure
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
        return int(self.optimizer.steps)

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


def options(config: Config) -> dict[str, Any]:
    """What a configuration says to the factory of its method; what it leaves open is left to the method."""
    names = ("interval", "fold", "rank", "keep", "clip")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(config, name)) is not None}
    if config.partition is not None:
        given["partition"] = partition_by_name(config.partition)
    if config.order is not None:
        given["schedule"] = schedule_by_name(config.order)
    if config.probes != 1:
        given["probes"] = config.probes
    if config.as_published:
        given["as_published"] = True
    if config.rounding != "stochastic":  # the default must not undo what as_published says of rounding
        given["rounding"] = Rounding[config.rounding.upper()]
    return given


def optimizer(config: Config, model: nn.Module) -> ZeroOrder:
    """The optimizer of a configuration's method."""
    given = {"lr": config.lr, "eps": config.eps, "seed": config.seed, "weight_decay": config.weight_decay}
    given |= options(config)
    if config.fold is None:
        given["fold"] = _fold(METHODS[config.method](specimen(), **given), config)
    return METHODS[config.method](model, **given)


def _fold(plain: ZeroOrder, config: Config) -> int:
    """The steps that a run holds where it does not say: as many as leave the weights whole at every evaluation."""
    if not _can_hold(plain, config):
        return 1
    return math.gcd(plain.interval, config.every) if config.every < config.steps else plain.interval


def _can_hold(plain: ZeroOrder, config: Config) -> bool:
    return plain.subspace.folds and not config.as_published and not config.weight_decay


def folds_if(config: Config, built: ZeroOrder) -> str:
    """What would let a run hold its steps for a whole turn; empty where nothing would, or where it chose."""
    better = -(-config.every // built.interval) * built.interval
    chosen = config.fold is not None or not _can_hold(built, config)
    if chosen or built.fold == built.interval or better > config.steps:
        return ""
    often = f"{built.fold} steps" if built.fold > 1 else "step"
    return (
        f"the weights are written every {often} and not every {built.interval}, for evaluations every {config.every}: "
        f"--eval-every {better} is faster"
    )


def check(config: Config) -> None:
    """Refuse options that the method does not have, before anything is loaded."""
    given = options(config)
    words = {"schedule": "order"}
    if config.method not in METHODS:
        if given:
            raise ZeroBlockError(f"{config.method} takes no {words.get(next(iter(given)), next(iter(given)))}")
        return
    for name in given:
        try:
            METHODS[config.method](specimen(), **{n: given[n] for n in {name, "interval"} & set(given)})
        except TypeError as error:
            raise ZeroBlockError(f"{config.method} takes no {words.get(name, name)}") from error
    built = optimizer(config, specimen())
    if config.every < config.steps and config.every % built.fold:
        raise ZeroBlockError(
            f"fold {built.fold} leaves the weights behind at step {config.every}, where they are to be evaluated: give "
            "--eval-every a multiple of it, or --fold a divisor of --eval-every"
        )
    if config.order is not None and len(built.blocks) == 1:
        raise ZeroBlockError(
            f"{config.method} has one block, and so no order: use a method of blocks, such as mezo_bcd"
        )


def learner(config: Config, model: nn.Module, listener: Listener) -> Learner:
    """What takes the steps of a configuration."""
    if config.method == BACKPROPAGATION:
        return Backpropagation(model, config.weight_decay, listener)
    return ZerothOrder(optimizer(config, model), listener)
