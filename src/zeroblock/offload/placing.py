"""Put a model's weights on a shelf, or refuse a model whose weights cannot be streamed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from ..amount import nbytes
from ..block import is_packed
from ..errors import ZeroBlockError, unknown
from ..shard import is_spread
from .layout import CONVERTED
from .mapped import Mapped
from .memory import Division, divide
from .region import Region
from .shelf import RESIDENT, Layer, Shelf, forget, keep, layers_of, shelf_of
from .streamed import MIN_BUFFERS, Streamed

Offload = Literal["host", "disk"]
PLACES: tuple[Offload, ...] = ("host", "disk")


@torch.no_grad()
def shelve(
    model: nn.Module,
    to: Offload = "host",
    *,
    device: torch.device | str | None = None,
    memory: str | int | Division | None = None,
    folder: str | Path = ".",
    dtype: torch.dtype | None = None,
) -> Shelf:
    """Keep a model's weights in memory of the host or on a disk, and bring them to the device layer by layer.

    Call it on a loaded model, before you build the engine and the optimizer; losses and weights are the same to the bit
    as with weights that stay on the device.

    >>> shelf = shelve(model, "host", device="cuda", memory="8GB")  # doctest: +SKIP
    >>> engine, optimizer = zb.Engine(model), zb.mezo_bcd(model, lr=1e-6)  # doctest: +SKIP

    Args:
        model: a model with layers in a ``ModuleList``; its weights may be anywhere, at best memory-mapped from
            safetensors. Their files are only read.
        to: ``"host"``: pinned memory. ``"disk"``: a file of the run, which disappears when the process ends.
        device: the device that the model computes on; the GPU by default, if there is one.
        memory: the memory of the device for weights, copies and rows: "8GB", bytes, or a ``Division``. By default
            only the layers that are needed next are on the device.
        folder: the folder of the file.
        dtype: the dtype to convert weights to on their way, tensor by tensor. They stay as they are by default, and if
            the model has this dtype already: some (an adapter's) may be meant to have another one.
    """
    if to not in PLACES:
        raise unknown("place for weights:", to, PLACES)
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())  # as tensors report it
    _unhook(model)
    _check(model)
    if isinstance(memory, str):
        memory = nbytes(memory)
    dtype = _conversion(model, dtype)
    layers, others = layers_of(model, dtype)
    if not layers:
        raise ZeroBlockError(f"{type(model).__name__} has no list of layers that could be streamed: leave out offload")
    silent = next((m for one in layers if (m := one.module) and type(m).forward is nn.Module.forward), None)
    if silent is not None:
        raise ZeroBlockError(
            f"the layers of {type(model).__name__} are never called (a {type(silent).__name__} has no forward), so "
            "zeroblock cannot tell when they run: leave out offload"
        )
    in_place = to == "disk" and target.type == "cpu"
    groups = [*layers, others] if in_place else layers
    total = sum(group.layout.nbytes for group in groups)
    division = divide(model, memory, dtype=dtype) if isinstance(memory, int) and not in_place else memory
    region = Region.file(total, folder) if to == "disk" else Region.memory(total)
    start = 0
    for group in groups:
        group.lay(region, start)
        start += group.layout.nbytes
    shelf: Shelf
    if in_place:
        shelf = Mapped(layers, region, _kept(layers, others, division))
    else:
        for tensor, slot in zip(others.tensors, others.layout.slots, strict=True):
            tensor.data = tensor.data.to(target, slot.dtype)
        if to == "host" and target.type == "cuda":
            region.pin((layer.span for layer in layers), target)
        buffers = division.buffers if isinstance(division, Division) else MIN_BUFFERS + 1
        shelf = Streamed(layers, region, target, buffers)
    if isinstance(division, Division) and division.pass_tokens is not None:
        shelf.tokens, shelf.pass_tokens = division.tokens, division.pass_tokens
    keep(model, shelf)
    return shelf


def _kept(layers: Sequence[Layer], others: Layer, memory: int | Division | None) -> int:
    """The number of layers that stay in memory on the CPU; all if no memory is given."""
    if memory is None:
        return len(layers)
    if isinstance(memory, Division):
        return memory.stay
    layer = max(one.layout.nbytes for one in layers)
    return max(0, (memory - others.layout.nbytes) // layer - 2 * MIN_BUFFERS)  # copies, and layers in transit


def unshelve(model: nn.Module) -> None:
    """Let a model's weights stay where they rest now, on the host, as ordinary tensors."""
    shelf_of(model).close()
    forget(model)


def _check(model: nn.Module) -> None:
    """Refuse a model whose weights cannot be streamed."""
    if shelf_of(model) is not RESIDENT:
        raise ZeroBlockError("the weights of this model are on a shelf already: unshelve it first")
    compiled = any(
        getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        for module in model.modules()
    )
    if compiled or any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ZeroBlockError("compiled and scripted models hold on to their weights: give the plain model")
    for name, param in model.named_parameters():
        if is_spread(param):
            raise ZeroBlockError(
                f"{name!r} is sharded over several processes, which divides the memory already: leave out offload, or "
                "run one process"
            )
        if is_packed(param) and type(param) is not nn.Parameter:
            raise ZeroBlockError(
                f"{name!r} is packed by another library ({type(param).__name__}), which keeps more than this tensor: "
                "leave out offload, or take integers that can be streamed (--weights int4)"
            )
        if param.is_meta:
            raise ZeroBlockError(f"{name!r} is on the meta device; load the weights first")


def _conversion(model: nn.Module, dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype that all weights of a model are to be converted to; None if there is nothing to convert."""
    loaded = next((param.dtype for param in model.parameters() if param.dtype in CONVERTED), dtype)
    if loaded == dtype:
        return None
    if dtype is not None and any(getattr(model, f"_keep_in_fp32_modules{end}", None) for end in ("", "_strict")):
        raise ZeroBlockError(
            f"some weights of {type(model).__name__} have to stay in fp32, which is decided while they are read: with "
            "--offload, give --dtype as its files have it"
        )
    return dtype


def _unhook(model: nn.Module) -> None:
    """Remove the hooks with which Accelerate streams weights, after reading its weights from host and disk.

    Those hooks copy every tensor again at every call, do not know about steps, and keep weights on the meta device.
    """
    if not any(hasattr(module, "_hf_hook") for module in model.modules()):
        return
    from accelerate.hooks import remove_hook_from_module  # type: ignore[import-untyped]

    remove_hook_from_module(model, recurse=True)
    left = next((name for name, param in model.named_parameters() if param.is_meta), None)
    if left is not None:
        raise ZeroBlockError(
            f"{left!r} is offloaded by Accelerate and does not come back when its hooks are removed: load the model "
            "without device_map, then call shelve"
        )
    vars(model).pop("hf_device_map", None)
