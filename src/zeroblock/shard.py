"""Shards: the part of a distributed tensor that this process holds, and the place of the part in the tensor.

FSDP2 (``fully_shard``) and tensor parallelism (``parallelize_module``) leave each process a box of every
tensor, as a ``DTensor``.  Noise is a function of its address, so a process perturbs and moves its own box
without communication.  The forward pass is torch's own: it gathers what it needs from the boxes in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from .errors import ZeroBlockError
from .noise import Rows


@dataclasses.dataclass(frozen=True)
class Box:
    """A part of a tensor: consecutive entries along every dimension.

    Args:
        shape: shape of the whole tensor.
        start: the part's first entry along each dimension.
        size: its number of entries along each dimension.

    >>> Box(shape=(4, 6), start=(2, 0), size=(2, 6)).offset
    12
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the part."""
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The part as an index of the whole tensor."""
        return tuple(slice(first, first + size) for first, size in zip(self.start, self.size, strict=True))

    @property
    def offset(self) -> int:
        """Index of the part's first element among the elements of the whole, in row-major order."""
        return sum(first * math.prod(self.shape[d + 1 :]) for d, first in enumerate(self.start))

    @property
    def cut(self) -> list[int]:
        """The dimensions along which the part is smaller than the whole."""
        return [d for d, (part, whole) in enumerate(zip(self.size, self.shape, strict=True)) if part != whole]

    @property
    def rows(self) -> Rows | None:
        """The layout of the part's elements from its first one on: rows with gaps; None if there are no gaps."""
        last = self.cut[-1] if self.cut else 0
        if last == 0 or not self.numel:
            return None
        inner = math.prod(self.shape[last + 1 :])
        return Rows(self.size[last] * inner, self.shape[last] * inner)

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape of the part as a matrix: entries along the first dimension, and along all others."""
        return self.size[0], math.prod(self.size[1:])

    @property
    def first_row(self) -> int:
        """Index of that matrix's first row among the rows of the whole."""
        return self.start[0]

    def columns(self, factor: Tensor) -> Tensor:
        """The rows of a factor (n, r), with one row per column of the whole as a matrix, for the part's columns."""
        inner = [slice(first, first + size) for first, size in zip(self.start[1:], self.size[1:], strict=True)]
        return factor.view(*self.shape[1:], -1)[tuple(inner)].reshape(-1, factor.shape[-1])


def is_spread(param: Tensor) -> bool:
    """Whether a tensor is a DTensor: every process holds a part or a copy of it."""
    if type(param) in (nn.Parameter, Tensor):  # called for every tensor at every step
        return False
    return hasattr(param, "placements") and hasattr(param, "device_mesh")


def local(param: Tensor) -> Tensor:
    """The tensor itself, or the shard of it that this process holds, in place."""
    if not is_spread(param):
        return param
    with torch.no_grad():  # then it is the very memory that a forward pass gathers from
        return cast(Tensor, cast(Any, param).to_local()).detach()


def whole(param: Tensor) -> Tensor:
    """The whole tensor, as one process would hold it; if it is sharded, every process of its mesh must call this."""
    return cast(Tensor, cast(Any, param).full_tensor()).detach() if is_spread(param) else param.detach()


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another process did not answer, in the words of torch's libraries."""
    words = ("gloo", "nccl", "pair closure", "by peer")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def box_of(name: str, param: Any) -> Box | None:
    """The box of this process's shard in a tensor; None if it holds the whole tensor.

    Args:
        name: name of the tensor, for errors.
        param: any tensor.
    """
    if not is_spread(param):
        return None
    kinds = [(placement, mesh) for placement, mesh in zip(param.placements, param.device_mesh.shape, strict=True)]
    if any(placement.is_partial() for placement, _ in kinds):
        raise ZeroBlockError(
            f"{name!r} is a sum of parts over processes ({param.placements}), which no step can move: redistribute it "
            "to Shard or Replicate before building the optimizer"
        )
    cuts = [(placement, mesh) for placement, mesh in kinds if not placement.is_replicate()]
    if not cuts:
        return None
    (chunk,) = param.__create_chunk_list__()
    box = Box(tuple(param.shape), tuple(chunk.offsets), tuple(chunk.sizes))
    ways = {d: math.prod(mesh for placement, mesh in cuts if placement.dim == d) for d, _ in enumerate(box.shape)}
    woven = [placement.dim for placement, _ in cuts if hasattr(placement, "split_factor")]
    if any(box.shape[d] % ways[d] for d in woven) or box.size != tuple(local(param).shape):
        raise ZeroBlockError(
            f"{name!r} of {box.shape} is cut {param.placements} into uneven pieces, of which no process holds "
            f"consecutive entries: pad dimension {woven[0] if woven else 0} to a multiple of the number of processes"
        )
    if len([d for d in box.cut if d]) > 1:
        raise ZeroBlockError(
            f"{name!r} is cut along the dimensions {box.cut}; a shard that zeroblock moves is cut along one, or along "
            "the first and one other: choose other placements, or freeze it with requires_grad_(False)"
        )
    return box


def companions(param: Any) -> set[int]:
    """The global ranks that together hold the shards of a tensor, this process included; empty if it is not sharded."""
    if not is_spread(param):
        return set()
    mesh, here = param.device_mesh, param.device_mesh.get_coordinate()
    cut = [not placement.is_replicate() for placement in param.placements]
    if here is None or not any(cut):
        return set()
    return set(mesh.mesh[tuple(slice(None) if c else i for c, i in zip(cut, here, strict=True))].flatten().tolist())


def held_alike(params: Iterable[Tensor], ranks: Sequence[int]) -> Iterator[Tensor]:
    """The tensors that several global ranks hold alike: whole ones, and copies of the same shards."""
    for param in params:
        if len(companions(param).intersection(ranks)) < 2:
            yield local(param)


def refuse_apart(params: Mapping[str, Tensor], apart: Iterable[int]) -> None:
    """Raise if ranks that measure other points of a step hold shards of the same tensors.

    Args:
        params: the parameters, by name.
        apart: the global ranks that measure other points than this process.
    """
    others = set(apart)
    for name, param in params.items():
        if others & companions(param):
            raise ZeroBlockError(
                f"ranks {sorted(companions(param))} hold the shards of {name!r}, which a forward pass gathers, so that "
                "they must measure the same points: share the data (parallel='data'), or share the probes across the "
                "shards: mesh = init_device_mesh(..., mesh_dim_names=('probes', 'shard')), fully_shard(..., "
                "mesh=mesh['shard']) and parallel=mesh['probes']"
            )


def summed(counts: Tensor, param: Any) -> Tensor:
    """counts ← their sum over the processes that hold the shards of a tensor; in place."""
    if is_spread(param):
        for dim, placement in enumerate(param.placements):
            if not placement.is_replicate():
                torch.distributed.all_reduce(counts, group=param.device_mesh.get_group(dim))
    return counts


class Gathering:
    """The modules of a model whose weights FSDP2 gathers for a forward pass.

    Args:
        model: any model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = _gathering(model)
        inside = {id(part) for module in self.modules for part in module.modules() if part is not module}
        self._roots = [module for module in self.modules if id(module) not in inside]
        for module in self.modules:
            module.reshard()
        owners = {id(part): part for module in self.modules for part in module.modules()}.values()
        named = ((owner._parameters, key) for owner in owners for key in owner._parameters)
        self._places = [(params, key) for params, key in named if is_spread(params[key])]
        """The places at which a module holds a shard while nothing is gathered."""

    def release(self) -> None:
        """Drop the weights that passes gathered, even passes that failed midway, so that the next one gathers anew."""
        for module in self.modules:
            module.reshard()
        for root in self._roots:  # forgets the passes that FSDP2 lists until a backward, which never comes
            with contextlib.suppress(AttributeError, RuntimeError):  # before torch 2.13, and for a part of a model
                root.reset_iter_state()
        if not all(is_spread(params[key]) for params, key in self._places):
            raise ZeroBlockError(
                "a forward pass of the sharded model failed midway and left weights gathered, which torch 2.13 can "
                "undo and this version cannot: update torch, or build the model and the optimizer again; if the pass "
                "was the engine's, give Engine(..., fork=False)"
            )


def _gathering(model: nn.Module) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    for path, module in model.named_modules():
        if isinstance(module, fsdp.FullyShardedDataParallel):
            raise ZeroBlockError(
                f"{path or 'the model'} is wrapped by FullyShardedDataParallel, whose flat shards have no shape: use "
                "torch.distributed.fsdp.fully_shard (FSDP2)"
            )
    kind = getattr(fsdp, "FSDPModule", None)  # in torch 2.6 and later
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]
