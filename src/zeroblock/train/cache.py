"""The model cache: keeps a model for the next run that starts from the same weights."""

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
from ..adapter import is_adapted
from ..errors import ZeroBlockError
from .config import Config

Key = tuple[Any, ...]
MAX_CACHED_BYTES = 4 << 30
"""Larger models are not kept, because keeping takes a second copy of the weights."""


@dataclass
class Cache:
    """One model and one tokenizer, with the settings they were loaded for.

    Args:
        model: the model's settings, the model and a copy of its weights.
        tokenizer: the tokenizer, by its settings.
    """

    model: tuple[Key, nn.Module, dict[str, Tensor]] | None = None
    tokenizer: dict[Key, Any] = field(default_factory=dict)


_cache: contextvars.ContextVar[Cache | None] = contextvars.ContextVar("cache", default=None)


@contextlib.contextmanager
def caching() -> Iterator[None]:
    """A context in which runs that start from the same weights load them once; small models are then held twice."""
    token = _cache.set(Cache())
    try:
        yield
    finally:
        _cache.reset(token)


def tokenizer(config: Config) -> Any:
    """Get the tokenizer of a run."""
    cache, key = _cache.get(), (config.model, config.trust_remote_code)
    if cache is None or key not in cache.tokenizer:
        loaded = models.tokenizer(config.model, trust_remote_code=config.trust_remote_code)
        if cache is None:
            return loaded
        cache.tokenizer = {key: loaded}
    return cache.tokenizer[key]


def model(config: Config) -> nn.Module:
    """Get the model of a run with the weights it starts from; the parameters it may move require gradients."""
    module = _loaded(config)
    if config.trains and models.is_quantised(module) and not is_adapted(module):
        raise ZeroBlockError(f"{config.model} is quantised, so its matrices cannot move: add --lora r=8,targets=q,v")
    if config.freeze is not None:
        _freeze(module, [word.strip() for word in config.freeze.split(",")])
    return module


def holds(config: Config, module: nn.Module) -> bool:
    """Whether :func:`model` would return this same module, with its weights restored, without loading."""
    cache = _cache.get()
    return cache is not None and cache.model is not None and cache.model[:2] == (_key(config), module)


def _freeze(module: nn.Module, patterns: list[str]) -> None:
    names = [name for name, _ in module.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            some = ", ".join(repr(name) for name in names[:3])
            raise ZeroBlockError(
                f"freeze: no parameter is called {pattern!r}; there are {some}, … (* matches anything)"
            )
    for name, param in module.named_parameters():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            param.requires_grad_(False)
    if not any(param.requires_grad for param in module.parameters()):
        raise ZeroBlockError("freeze leaves nothing to train: freeze less")


def _loaded(config: Config) -> nn.Module:
    if config.offload is not None:  # on the host, as mapped files where possible, and never kept: the run moves it
        return _load(config, "cpu", lazy=True)
    cache, key = _cache.get(), _key(config)
    if cache is not None and cache.model is not None and cache.model[0] == key:
        _, kept, weights = cache.model
        with torch.no_grad():
            for name, param in kept.named_parameters():
                param.copy_(weights[name])
                param.requires_grad_(weights[name].requires_grad)
                param.grad = None
        return kept
    if cache is not None:
        cache.model = None  # free its memory before loading
    module = _load(config, config.device)
    if cache is not None and sum(param.nbytes for param in module.parameters()) <= MAX_CACHED_BYTES:
        cache.model = (key, module, {name: _copy(param) for name, param in module.named_parameters()})
    return module


def _load(config: Config, device: str, lazy: bool = False) -> nn.Module:
    return models.load(
        config.model,
        config.dtype,
        device,
        random_weights=config.random_weights,
        seed=config.seed,
        trust_remote_code=config.trust_remote_code,
        adapter=config.adapter,
        weights=config.weights,
        lazy=lazy,
    )


def _copy(param: Tensor) -> Tensor:
    """Copy a parameter's values and its ``requires_grad``."""
    return param.detach().clone().requires_grad_(param.requires_grad)


def _key(config: Config) -> Key:
    seed = config.seed if config.random_weights else None
    kind = (config.model, config.dtype, config.device, config.random_weights, seed, config.trust_remote_code)
    return (*kind, config.adapter, config.weights)
