"""Cases with sharded weights, which the tests run in every rank of a pool."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pool import group
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import lora_toy
import zeroblock as zb
from toy import same
from zeroblock.basis import Basis, Elementwise
from zeroblock.engine.anatomy import Anatomy, ForkError
from zeroblock.engine.fork import forking
from zeroblock.journal import Header
from zeroblock.method import METHODS
from zeroblock.shard import Gathering, whole
from zeroblock.train import snapshot
from zeroblock.turn import Turn

VOCABULARY = 7
STEPS = 3
SPECIAL: dict[str, dict[str, Any]] = {
    "lozo": {"interval": 2},
    "lozo_m": {"interval": 2},
    "mezo_bcd_adam": {"interval": 2},
}
"""Options with which three steps see two turns."""
Weights = dict[str, Tensor]


class Layer(nn.Module):
    """Norm, then up and down, beside the residual."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Toy(nn.Module):
    """Odd sizes, biases, a tied head: 7 rows over 2 ranks are uneven, 3 rows over 4 leave one of them without any."""

    def __init__(self, dtype: torch.dtype = torch.float32, inner: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.layers = nn.ModuleList(Layer(6, inner) for _ in range(2))
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(0)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator) * 0.3
        self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Odd(zb.subspace.Full):
    """A subspace whose basis does not say what a shard takes of it."""

    def basis(self, param: Tensor, key: Any, site: Any) -> Basis:
        class Whole(Elementwise):
            cut = Basis.cut

        return Whole(param.numel(), site)


def batch(model: nn.Module, number: int) -> Callable[[], Tensor]:
    """Cross-entropy of predicting the successors of some words."""
    tokens = torch.randint(0, VOCABULARY, (5,), generator=torch.Generator().manual_seed(number))
    return lambda: F.cross_entropy(model(tokens).float(), (tokens + 1) % VOCABULARY)


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A model with FSDP2: its layers, and what remains."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A model with tensor-parallel layers."""
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def sized(size: int) -> tuple[Any, Any]:
    """The sizes that optimizers without a learning rate read off LoRA, beside whole matrices and beside shards."""
    whole_one = zb.mezo_bcd(lora_toy.adapted(), parallel=None)
    model = lora_toy.adapted()
    mesh = DeviceMesh.from_group(group(size), "cpu")
    for layer in model.base_model.model.layers:
        fully_shard(layer, mesh=mesh)
    optimizer = zb.mezo_bcd(model, parallel=None)
    assert optimizer.weights.sharded
    assert optimizer.weights.sizes
    return whole_one.weights.initial, optimizer.weights.initial


def gathered(optimizer: zb.ZeroOrder) -> Weights:
    """Whole weights, by value."""
    return {name: optimizer.weights.whole(name).clone() for name in optimizer.params}


def trained(
    name: str,
    model: nn.Module,
    batches: Callable[[nn.Module, int], Any],
    **options: Any,
) -> tuple[Weights, list[tuple[float, ...]]]:
    """Weights after some steps, and the coefficients of each."""
    optimizer = METHODS[name](model, lr=1e-2, **{**SPECIAL.get(name, {}), **options})
    coeffs = []
    for step in range(STEPS):
        optimizer.step(batches(model, step))
        assert optimizer.record is not None
        coeffs.append(optimizer.record.coeffs)
    optimizer.settle()
    return gathered(optimizer), coeffs


def alone(name: str, dtype: torch.dtype, shares: int = 1, **options: Any) -> tuple[Weights, list[tuple[float, ...]]]:
    """One process that has whole weights and the micro-batches of all shares."""
    return trained(
        name, Toy(dtype), lambda model, step: [batch(model, 10 * step + s) for s in range(shares)], **options
    )


def together(names: Iterable[str], dtype: torch.dtype, size: int) -> dict[str, Any]:
    """FSDP2 over some ranks, each with data of its own."""
    rank, mesh = dist.get_rank(), DeviceMesh.from_group(group(size), "cpu")
    return {
        name: trained(
            name, sharded(Toy(dtype), mesh), lambda model, step: batch(model, 10 * step + rank), parallel=group(size)
        )
        for name in names
    }


def across(name: str, dtype: torch.dtype, way: str) -> Any:
    """Four ranks: pairs hold the shards of a model, and the pairs share the data or the probes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(way, "shard"))
    share = mesh.get_local_rank(way) if way == "data" else 0
    model = sharded(Toy(dtype), mesh["shard"])
    options = {"probes": 2} if way == "probes" else {}
    return trained(name, model, lambda model, step: batch(model, 10 * step + share), parallel=mesh[way], **options)


def counted(loss: Callable[[], Tensor]) -> Callable[[], float]:
    """An objective that runs the model, but whose values do not depend on it."""
    numbers = itertools.count()

    def value() -> float:
        assert torch.isfinite(loss())
        return 1 + 0.01 * (next(numbers) % 7)

    return value


def arranged(names: Iterable[str], dtype: torch.dtype, way: str | None) -> dict[str, Weights]:
    """Weights after steps of given coefficients: tensor parallel ("tp"), with FSDP2 too ("both"), replicas of FSDP2
    ("hybrid"), columns ("columns"), or whole."""
    mesh = None if way is None else init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    results = {}
    for name in names:
        model: nn.Module = Toy(dtype, inner=8)
        if mesh is not None:
            if way in ("tp", "both"):
                split(model, mesh["tp"] if way == "both" else DeviceMesh.from_group(group(4), "cpu"))
            if way in ("both", "hybrid"):
                sharded(model, mesh["dp"] if way == "both" else mesh)
            if way == "columns":
                place_columns(model, mesh)
        objective = counted(batch(model, 0)) if way != "columns" else counted(lambda: torch.zeros(()))
        options = {} if way is None else {"parallel": group(4)}
        results[name], _ = trained(name, model, lambda *_, objective=objective: objective, **options)
    return results


def place_columns(model: nn.Module, mesh: DeviceMesh) -> None:
    """Matrices cut along both dimensions, unevenly, and copies of everything else."""
    placed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, param in module._parameters.items():
            if param is not None and id(param) not in placed:
                placements = [Shard(0), Shard(1)] if param.dim() == 2 else [Replicate(), Replicate()]
                placed[id(param)] = nn.Parameter(distribute_tensor(param.data, mesh, placements))
            module._parameters[key] = param if param is None else placed[id(param)]


def replayed(records: list[zb.Record]) -> tuple[Header, Weights]:
    """The header of a sharded run, and its weights after the records of another."""
    model = sharded(Toy(), DeviceMesh.from_group(group(2), "cpu"))
    optimizer = METHODS["mezo_bcd_adam"](model, lr=1e-2, parallel=group(2))
    header = Header.of(optimizer)
    zb.replay(optimizer, records)
    return header, gathered(optimizer)


def loaded(file: str) -> tuple[Weights, list[float]]:
    """Weights of a sharded model that a journal was loaded into; losses before that, with it, and without it again."""
    model = sharded(Toy(), DeviceMesh.from_group(group(2), "cpu"))
    losses, loss = [], batch(model, 0)
    with torch.no_grad():
        losses.append(float(loss()))
        zb.load(model, file)
        losses.append(float(loss()))
        gathering = Gathering(model)
        weights = {name: whole(param).clone() for name, param in model.named_parameters()}
        gathering.release()
        zb.unload(model)
        losses.append(float(loss()))
    return weights, losses


RECORDS = [zb.Record(step, 0, (0.5,), 1e-2, (1.0, 1.0), 1.0) for step in range(3)]
"""Steps of the first block."""


def saved(name: str, folder: str) -> Weights:
    """Weights after the steps above: saved, loaded by other shards, and compared."""
    rank, optimizers = dist.get_rank(), []
    for _ in range(2):
        model = sharded(Toy(), DeviceMesh.from_group(group(2), "cpu"))
        optimizers.append(METHODS[name](model, lr=1e-2, parallel=group(2)))
    first, second = optimizers
    zb.replay(first, RECORDS)
    snapshot.save(Path(folder), first, writes=rank == 0)
    dist.barrier(group(2))
    assert snapshot.load(Path(folder), second, RECORDS) == ""
    weights = gathered(first)
    if Path(folder).exists():
        assert second.steps == len(RECORDS)
        assert same(weights, gathered(second))
    return weights


def resumed() -> bool:
    """Whether a state continues where it was taken, given the weights: low-rank momentum, which follows the bases."""
    mesh, passes = DeviceMesh.from_group(group(2), "cpu"), []
    model: nn.Module = sharded(Toy(), mesh)
    first = METHODS["lozo_m"](model, lr=1e-2, parallel=group(2), **SPECIAL["lozo_m"])
    for _ in range(3):
        first.step(batch(model, 0))
    again: nn.Module = Toy()
    again.load_state_dict(gathered(first), strict=False)
    second = METHODS["lozo_m"](sharded(again, mesh), lr=1e-2, parallel=group(2), **SPECIAL["lozo_m"])
    second.load_state_dict(first.state_dict())
    for optimizer, one in ((first, model), (second, again)):
        for _ in range(3):
            optimizer.step(batch(one, 0))
        passes.append(gathered(optimizer))
    return same(*passes)


def interrupted() -> bool:
    """Whether a pass that fails midway leaves the weights, and nothing gathered that the next pass would read."""
    mesh, ends = DeviceMesh.from_group(group(2), "cpu"), []
    for fails in (False, True):
        model: nn.Module = sharded(Toy(), mesh)
        optimizer = METHODS["mezo"](model, lr=1e-2, parallel=group(2))
        optimizer.step(batch(model, 0))
        if fails:
            before = gathered(optimizer)
            hook = model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
            with contextlib.suppress(ZeroDivisionError):
                optimizer.step(batch(model, 1))
            hook.remove()
            assert same(gathered(optimizer), before)
        optimizer.step(batch(model, 2))
        ends.append((batch(model, 3)().item(), gathered(optimizer)))
    return ends[0][0] == ends[1][0] and not same(before, ends[1][1])


@torch.no_grad()
def forked(name: str, way: str) -> list[Tensor]:
    """What a forked pass returns for every block: of whole weights, of layers that FSDP2 gathers, or of their parts."""
    model: nn.Module = Toy()
    if way == "parts":
        for layer in model.layers:
            fully_shard(layer.up, mesh=DeviceMesh.from_group(group(2), "cpu"))
    if way != "whole":
        sharded(model, DeviceMesh.from_group(group(2), "cpu"))
    options = {} if way == "whole" else {"parallel": group(2)}
    optimizer = METHODS[name](model, lr=1e-2, interval=1, **options)
    anatomy, tokens, outs = Anatomy(model), torch.arange(5)[None], []
    for block in range(len(optimizer.blocks)):
        optimizer.weights.release()
        optimizer.enter(Turn(block, block, block, tuple(optimizer.scores)))
        with forking(anatomy, optimizer.plan().points, 5, watch=True):
            outs.append(model(tokens))
    return outs


def unforkable() -> str:
    """Why parts of a layer that FSDP2 gathers one by one cannot be forked."""
    try:
        forked("mezo", "parts")
    except ForkError as error:
        return str(error)
    return ""


def refused(way: str) -> str:
    """What an optimizer says to something that cannot work."""
    mesh = DeviceMesh.from_group(group(2), "cpu") if way != "dimensions" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if way == "probes":
                METHODS["mezo"](sharded(Toy(), mesh), probes=2, parallel=zb.ranks.Ranks(group(2), ((0, 1),), True))
            if way == "flat":
                from torch.distributed.fsdp import FullyShardedDataParallel

                METHODS["mezo"](FullyShardedDataParallel(Toy(), process_group=group(2), device_id=torch.device("cpu")))
            if way == "basis":
                METHODS["mezo"](sharded(Toy(), mesh), parallel=group(2), subspace=Odd())
            if way in ("rule", "anchor"):
                METHODS["conmezo" if way == "rule" else "mezo_svrg"](sharded(Toy(), mesh), parallel=group(2))
            if way == "dimensions":
                grid, cube = init_device_mesh("cpu", (2, 2)), nn.Module()
                cube.w = nn.Parameter(distribute_tensor(torch.zeros(2, 4, 4), grid, [Shard(1), Shard(2)]))
                METHODS["mezo"](cube)
            if way == "state":
                state = METHODS["mezo"](Toy(), parallel=None).state_dict()
                METHODS["mezo"](sharded(Toy(), mesh), parallel=group(2)).load_state_dict(state)
        except zb.ZeroBlockError as error:
            return str(error)
    return ""
