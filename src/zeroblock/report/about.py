"""``about.json``: the machine, the versions, and the size of every block's weights at the start of a run."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import atomic
from ..errors import shown
from ..evaluate.measurement import MAX_SHOWN, is_bounded
from .summary import MAX_BLOCKS

if TYPE_CHECKING:
    from torch import nn

    from ..optimizer import ZeroOrder

NAME = "about.json"
PACKAGES = ("zeroblock", "torch", "transformers", "numpy", "numba", "triton", "peft")
"""Packages whose versions a report states, where they are installed."""


def write_about(
    folder: Path, model: nn.Module, optimizer: ZeroOrder | None, sizes: Sequence[float | None] = ()
) -> None:
    """Write ``about.json`` of a run folder, before the first step.

    Args:
        folder: the run's folder.
        model: the model at its base weights.
        optimizer: the optimizer of a zeroth-order method; None for other methods.
        sizes: the sizes of its blocks; see :func:`block_sizes`.
    """
    from ..bench.host import machine
    from ..quantise import elements

    first = next(model.parameters())
    about: dict[str, Any] = {
        "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(first.device.type),
        "system": platform.platform(),
        "device": str(first.device),
        "dtype": str(first.dtype).removeprefix("torch."),
        "weights": sum(map(elements, model.parameters())),
        "versions": {"python": platform.python_version()} | versions(PACKAGES),
    }
    if optimizer is not None:
        about["parts"] = {name: str(value) for name, value in optimizer.parts.items()}
        about["blocks"] = [
            {
                "name": block.name,
                "weights": sum(elements(optimizer.params[name]) for name in block.params),
                "rms": rms,
            }
            for block, rms in zip(optimizer.blocks, sizes, strict=True)
        ]
    atomic.write(folder / NAME, json.dumps(about, indent=2) + "\n")


def block_sizes(optimizer: ZeroOrder) -> list[float | None]:
    """The root mean square of the weights of every block; None for a block without readable numbers.

    If the weights are sharded, every process must call this.
    """
    return [_rms([optimizer.weights.values(name) for name in block.params]) for block in optimizer.blocks]


def versions(names: tuple[str, ...]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    from .. import __version__

    found = {}
    for name in names:
        try:
            found[name] = __version__ if name == "zeroblock" else importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _rms(tensors: list[Any]) -> float | None:
    """The root mean square of the elements of some tensors; None if they hold no readable numbers."""
    import torch

    from ..shard import whole

    tensors = [tensor.detach() for tensor in tensors if tensor.is_floating_point() and not tensor.is_meta]
    count = sum(tensor.numel() for tensor in tensors)
    if not count:
        return None
    norms = [torch.linalg.vector_norm(whole(tensor), dtype=torch.float32).double() for tensor in tensors]
    rms = math.sqrt(sum(float(norm) ** 2 for norm in norms) / count)
    return rms if math.isfinite(rms) else None


def read_about(folder: Path) -> dict[str, Any]:
    """Read ``about.json``; empty for a run of an older version, which has none. A damaged file raises a ValueError."""
    try:
        about = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(about, dict):
        raise ValueError("it is not an object")
    blocks = about.setdefault("blocks", [])
    if not isinstance(blocks, list) or len(blocks) > MAX_BLOCKS:
        raise ValueError("blocks is not a list of blocks")
    for block in blocks:
        if not isinstance(block, dict) or not isinstance(block.get("name"), str):
            raise ValueError("a block has no name")
        for key in ("weights", "rms"):
            _check_number(key, block.get(key))
    _check_number("weights", about.get("weights"))
    for key in ("parts", "versions"):
        if not isinstance(about.setdefault(key, {}), Mapping):
            raise ValueError(f"{key} is not an object")
    return about


def _check_number(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_bounded(value) or value < 0:
        raise ValueError(f"{name} is {shown(repr(value), MAX_SHOWN)}")
