"""Builds the optimizer of a configuration, and checks the method's options before anything is loaded."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from typing import Any, Protocol

from torch import nn

from .. import quantise
from ..block import by_name as partition_by_name
from ..errors import ZeroBlockError, ZeroBlockWarning
from ..method import METHODS, specimen
from ..noise import Rounding
from ..optimizer import ZeroOrder
from ..precision import small_eps
from ..schedule import by_name as schedule_by_name
from ..turn import Turns


class Choice(Protocol):
    """The settings of :class:`~zeroblock.train.config.Config` that decide the optimizer."""

    @property
    def method(self) -> str: ...
    @property
    def lr(self) -> float | None: ...
    @property
    def eps(self) -> float | None: ...
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
    """Collect the options that a configuration sets; the method's defaults apply to the others."""
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


def optimizer(config: Choice, model: nn.Module, rehearsal: bool = False, **more: Any) -> ZeroOrder:
    """Build the optimizer of a configuration's method.

    Args:
        config: names the method and its options.
        model: the model to train.
        rehearsal: whether the model is the specimen that options are tried on.
        more: further options of the optimizer, such as ``parallel``.
    """
    names = ("lr", "eps", "seed", "weight_decay")
    given = {name: getattr(config, name) for name in names} | options(config)
    if config.fold is None:
        given["fold"] = _fold(METHODS[config.method](specimen(), **_rehearsed(given)), config)
    return METHODS[config.method](model, **(_rehearsed(given) if rehearsal else given), **more)


def most(config: Choice, blocks: int) -> int:
    """The largest number of blocks that one step moves, out of ``blocks``; 0 if the method is not in ``METHODS``."""
    if config.method not in METHODS:
        return 0
    turns: Turns = optimizer(config, specimen(), rehearsal=True).turns
    return dataclasses.replace(turns, blocks=blocks).most


def _rehearsed(given: dict[str, Any]) -> dict[str, Any]:
    """Options for the specimen: a schedule may hold a number per block of the model, and the specimen has others."""
    return {**given, "schedule": type(given["schedule"])()} if "schedule" in given else given


def _fold(plain: ZeroOrder, config: Choice) -> int:
    """The default fold: the largest that leaves the weights whole at every evaluation."""
    if not _can_fold(plain, config):
        return 1
    return math.gcd(plain.interval, config.every) if config.every < config.steps else plain.interval


def _can_fold(plain: ZeroOrder, config: Choice) -> bool:
    return plain.subspace.folds and not config.as_published and not config.weight_decay


def fold_advice(config: Choice, built: ZeroOrder) -> str:
    """Advise an ``--eval-every`` that lets a run fold once per turn; empty if it already does, cannot, or sets fold."""
    better = -(-config.every // built.interval) * built.interval
    chosen = config.fold is not None or not _can_fold(built, config)
    if chosen or built.fold == built.interval or better > config.steps:
        return ""
    often = f"{built.fold} steps" if built.fold > 1 else "step"
    return (
        f"the weights are written every {often} instead of every {built.interval} steps, because of evaluations every "
        f"{config.every} steps: --eval-every {better} is faster"
    )


def eps_advice(built: ZeroOrder) -> str:
    """Advise another eps where losses in bf16 do not resolve it; empty where they do."""
    if (found := small_eps(built)) is None:
        return ""
    told, better = found
    return f"{told}; leave out --lr and --eps, or give --eps {better:g} or --dtype fp32"


def check(config: Choice) -> None:
    """Refuse options that the method does not have, before anything is loaded."""
    given = options(config)
    how: str | None = getattr(config, "weights", None)
    if how is not None:
        quantise.check(how)
        if config.method == "ft":
            raise ZeroBlockError("ft computes gradients, which integers do not have: leave out --weights")
    if config.method not in METHODS:
        if given:
            raise ZeroBlockError(f"{config.method} takes no {next(iter(given))}")
        return
    for name in given:
        try:
            METHODS[config.method](specimen(), **_rehearsed({n: given[n] for n in {name, "interval"} & set(given)}))
        except TypeError as error:
            raise ZeroBlockError(f"{config.method} takes no {name}") from error
    if config.as_published and config.lr is None:
        raise ZeroBlockError(f"{config.method} as published has a learning rate: give --lr, or leave out as_published")
    moved = how if getattr(config, "adapter", None) is None else None  # with an adapter, only that moves
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ZeroBlockWarning)  # about the specimen's weights
        built = optimizer(config, quantise.store_(copy.deepcopy(specimen()), moved), rehearsal=True)
    if config.rounding == "stochastic" and built.parts["rounding"] != "stochastic":
        raise ZeroBlockError(
            f"{config.method} as published rounds to the nearest number, as its published code does: leave out "
            "rounding, or as_published"
        )
    if config.every < config.steps and config.every % built.fold:
        raise ZeroBlockError(
            f"fold {built.fold} has not added all steps to the weights at the evaluation of step {config.every}: give "
            "--eval-every a multiple of it, or --fold a divisor of --eval-every"
        )
    if config.schedule is not None and len(built.blocks) == 1:
        raise ZeroBlockError(
            f"{config.method} has one block, so it takes no schedule: use a method of blocks, such as mezo_bcd"
        )
