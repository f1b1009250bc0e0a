"""From a configuration to its optimizer: the options of a method, checked before anything is loaded."""

from __future__ import annotations

import math
from typing import Any, Protocol

from torch import nn

from ..block import by_name as partition_by_name
from ..errors import ZeroBlockError
from ..method import METHODS, specimen
from ..noise import Rounding
from ..optimizer import ZeroOrder
from ..schedule import by_name as schedule_by_name


class Choice(Protocol):
    """The settings of :class:`~zeroblock.train.config.Config` that decide the optimizer."""

    @property
    def method(self) -> str: ...
    @property
    def lr(self) -> float | None: ...
    @property
    def eps(self) -> float: ...
    @property
    def steps(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def partition(self) -> str | None: ...
    @property
    def schedule(self) -> str | None: ...
    @property
    def fold(self) -> int | None: ...
    @property
    def probes(self) -> int: ...
    @property
    def as_published(self) -> bool: ...
    @property
    def rounding(self) -> str | None: ...
    @property
    def every(self) -> int: ...


def options(config: Choice) -> dict[str, Any]:
    """Collect the options that a configuration gives to its method; those left open are the method's own."""
    names = ("interval", "fold", "rank", "keep", "clip")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(config, name)) is not None}
    if config.partition is not None:
        given["partition"] = partition_by_name(config.partition)
    if config.schedule is not None:
        given["schedule"] = schedule_by_name(config.schedule)
    if config.probes != 1:
        given["probes"] = config.probes
    if config.as_published:
        given["as_published"] = True
    if config.rounding == "nearest":
        given["rounding"] = Rounding.NEAREST
    return given


def optimizer(config: Choice, model: nn.Module, **more: Any) -> ZeroOrder:
    """Build the optimizer of a configuration's method; ``more`` are options that decide how it runs."""
    given = {"lr": config.lr, "eps": config.eps, "seed": config.seed, "weight_decay": config.weight_decay}
    given |= options(config)
    if config.fold is None:
        given["fold"] = _fold(METHODS[config.method](specimen(), **given), config)
    return METHODS[config.method](model, **given, **more)


def _fold(plain: ZeroOrder, config: Choice) -> int:
    """The steps to collect if the run does not say: as many as leave the weights whole at every evaluation."""
    if not _can_fold(plain, config):
        return 1
    return math.gcd(plain.interval, config.every) if config.every < config.steps else plain.interval


def _can_fold(plain: ZeroOrder, config: Choice) -> bool:
    return plain.subspace.folds and not config.as_published and not config.weight_decay


def fold_advice(config: Choice, built: ZeroOrder) -> str:
    """Say which ``--eval-every`` would let a run fold once per turn; empty if none would, or if the run chose."""
    better = -(-config.every // built.interval) * built.interval
    chosen = config.fold is not None or not _can_fold(built, config)
    if chosen or built.fold == built.interval or better > config.steps:
        return ""
    often = f"{built.fold} steps" if built.fold > 1 else "step"
    return (
        f"the weights are written every {often} and not every {built.interval}, because of evaluations every "
        f"{config.every} steps: --eval-every {better} is faster"
    )


def check(config: Choice) -> None:
    """Refuse options that the method does not have, before anything is loaded."""
    given = options(config)
    if config.method not in METHODS:
        if given:
            raise ZeroBlockError(f"{config.method} takes no {next(iter(given))}")
        return
    for name in given:
        try:
            METHODS[config.method](specimen(), **{n: given[n] for n in {name, "interval"} & set(given)})
        except TypeError as error:
            raise ZeroBlockError(f"{config.method} takes no {name}") from error
    built = optimizer(config, specimen())
    if config.rounding == "stochastic" and built.parts["rounding"] != "stochastic":
        raise ZeroBlockError(
            f"{config.method} as published rounds to the nearest number, as its published code does: leave out "
            "rounding, or as_published"
        )
    if config.every < config.steps and config.every % built.fold:
        raise ZeroBlockError(
            f"fold {built.fold} leaves the weights behind at step {config.every}, where they are to be evaluated: give "
            "--eval-every a multiple of it, or --fold a divisor of --eval-every"
        )
    if config.schedule is not None and len(built.blocks) == 1:
        raise ZeroBlockError(
            f"{config.method} has one block, so it takes no schedule: use a method of blocks, such as mezo_bcd"
        )
