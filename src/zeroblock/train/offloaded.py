"""Decides from a run's settings where its weights rest, before anything is loaded, and tells the user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from .. import model as models
from ..amount import nbytes
from ..bench.memory import table
from ..engine.engine import GPU_MAX_TOKENS
from ..errors import ZeroBlockError
from ..offload import Division, divide, least_division, shelve
from .config import Config


def decided(config: Config) -> Config:
    """Return the configuration with ``offload`` set if it limits the memory and the weights do not fit.

    Args:
        config: with its dtype resolved.
    """
    on_cpu = models.find_device(config.device).type == "cpu"
    if config.offload == "host" and on_cpu:
        raise ZeroBlockError("on the CPU the weights are in memory of the host already: use --offload disk")
    if config.memory is None or config.offload is not None:
        return config
    skeleton = models.skeleton(
        config.model, trust_remote_code=config.trust_remote_code, adapter=config.adapter, weights=config.weights
    )
    division = divided(config, skeleton)
    assert division is not None
    if division.stay == division.layers:
        return config
    return config.replace(offload="disk" if on_cpu else "host")


def divided(config: Config, model: nn.Module) -> Division | None:
    """Divide the memory of a run; None if it has no limit and all weights stay, or are read from a file.

    Args:
        config: the resolved configuration.
        model: the model, possibly on the meta device.
    """
    streams = config.offload is not None and models.find_device(config.device).type == "cuda"
    if config.memory is None and not streams:
        return None
    dtype = models.DTYPES[config.dtype]
    needs = {need.method: need.kept_here for need in table(model, dtype.itemsize)} if config.trains else {}
    kind, _, count = (config.partition or "").partition(":")
    lifted = int(count) if kind == "layers" and count.isdigit() else 1
    kept = int(needs.get(config.method, 0))
    if config.memory is None:
        return least_division(model, config.max_tokens or GPU_MAX_TOKENS, dtype=dtype, lifted=lifted, kept=kept)
    memory = nbytes(config.memory)
    return divide(model, memory, dtype=dtype, lifted=lifted, kept=kept, tokens=config.max_tokens)


def shelved(config: Config, model: nn.Module, folder: Path, tell: Callable[[str], None]) -> int | None:
    """Put the weights of a run on their shelf; return the most tokens per row, or None if memory does not limit them.

    Args:
        config: the resolved configuration.
        model: the model, loaded on the host.
        folder: the run's folder, for a file of weights.
        tell: called with lines for the user.
    """
    division = divided(config, model)
    if division is not None:
        tell(division.describe())
    if config.offload is None:
        return None if division is None else division.tokens
    device, dtype = models.find_device(config.device), models.DTYPES[config.dtype]
    shelf = shelve(model, config.offload, device=device, memory=division, folder=folder, dtype=dtype)
    tell(shelf.describe())
    return None if division is None else division.tokens
