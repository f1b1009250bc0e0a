"""The shelf: a model kept for the next run that starts from the same weights."""

from __future__ import annotations

import contextlib
import contextvars
import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .. import model as models
from ..errors import ZeroBlockError
from .config import Config

Key = tuple[Any, ...]
SMALL = 4 << 30
"""Bytes of weights up to which a model is kept: keeping takes a second copy."""


@dataclass
class Shelf:
    """Room for one model and for one tokenizer, with what they were loaded for.

    Args:
        model: with a copy of its weights.
        tokenizer: as it is.
    """

    model: tuple[Key, nn.Module, dict[str, Tensor]] | None = None
    tokenizer: dict[Key, Any] = field(default_factory=dict)


_shelf: contextvars.ContextVar[Shelf | None] = contextvars.ContextVar("shelf", default=None)


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """Inside, runs that start from the same weights load them once, at the price of a second copy of small ones."""
    token = _shelf.set(Shelf())
    try:
        yield
    finally:
        _shelf.reset(token)


def tokenizer(config: Config) -> Any:
    """The tokenizer of a run."""
    shelf, key = _shelf.get(), (config.model, config.trust_remote_code)
    if shelf is None or key not in shelf.tokenizer:
        found = models.tokenizer(config.model, trust_remote_code=config.trust_remote_code)
        if shelf is None:
            return found
        shelf.tokenizer = {key: found}
    return shelf.tokenizer[key]


def model(config: Config) -> nn.Module:
    """The model of a run, with the weights it starts from; those that it moves are trainable."""
    found = _loaded(config)
    if config.freeze is not None:
        _freeze(found, [word.strip() for word in config.freeze.split(",")])
    return found


def _freeze(module: nn.Module, patterns: list[str]) -> None:
    names = [name for name, _ in module.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            some = ", ".join(repr(name) for name in names[:3])
            raise ZeroBlockError(f"freeze: no parameter is called {pattern!r}; there are {some}, … (* stands for any)")
    for name, param in module.named_parameters():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            param.requires_grad_(False)
    if not any(param.requires_grad for param in module.parameters()):
        raise ZeroBlockError("freeze leaves nothing to train: freeze less")


def _loaded(config: Config) -> nn.Module:
    shelf, key = _shelf.get(), _key(config)
    if shelf is not None and shelf.model is not None and shelf.model[0] == key:
        _, kept, weights = shelf.model
        with torch.no_grad():
            for name, param in kept.named_parameters():
                param.copy_(weights[name])
                param.requires_grad_(weights[name].requires_grad)
                param.grad = None
        return kept
    if shelf is not None:
        shelf.model = None  # the room is needed
    found = models.load(
        config.model,
        config.dtype,
        config.device,
        random_weights=config.random_weights,
        seed=config.seed,
        trust_remote_code=config.trust_remote_code,
    )
    if shelf is not None and sum(param.nbytes for param in found.parameters()) <= SMALL:
        shelf.model = (key, found, {name: _copy(param) for name, param in found.named_parameters()})
    return found


def _copy(param: Tensor) -> Tensor:
    """A parameter's values and whether it is trainable."""
    return param.detach().clone().requires_grad_(param.requires_grad)


def _key(config: Config) -> Key:
    seed = config.seed if config.random_weights else None
    return (config.model, config.dtype, config.device, config.random_weights, seed, config.trust_remote_code)
