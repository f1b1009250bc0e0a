"""Where the weights of a run rest, from its settings: decided before anything is loaded, and said."""

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
    """The configuration with a place for its weights, if it gives a memory and they do not fit there.

    Args:
        config: with its device and dtype.
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
    """How the memory of a run is divided; None where none is given and all weights stay, or are read from a file.

    Args:
        config: resolved.
        model: may be on the meta device.
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
    """Put the weights of a run where they will rest; returns how long rows may be, where the memory limits them.

    Args:
        config: resolved.
        model: loaded on the host.
        folder: of the run, which holds a file of weights.
        tell: is called with lines for the user.
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
