"""Runs on several ranks: picks the rank that writes, divides the work, and checks that all ranks match."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .. import __version__, adapter
from .. import model as models
from ..block import stacks
from ..errors import ZeroBlockError
from ..journal import fingerprint
from .config import BACKPROPAGATION, EXECUTION, Config
from .folder import Folder
from .follower import Follower
from .peers import Peers
from .workload import Workload, engine_of, prepare

SHARED = {
    "data": "the examples of every batch",
    "probes": "the probes of every step",
    "data,probes": "the examples and the probes of every step",
}
"""The values of ``parallel``, in words."""
UNSPLIT_TOKENS = 1 << 30
"""Too many for any row to be split: ranks with sharded weights that split rows differently would deadlock."""
OWN = ("model", "task", "trust_remote_code")
"""Settings that may differ between ranks: paths on their machines, whose contents are compared."""
COMMON = ("parallel", "shard", "engine", "snapshot_every", "max_minutes")
"""Settings of EXECUTION that must be equal on all ranks: they decide when ranks wait for one another."""


@contextlib.contextmanager
def opened(out: str | Path, peers: Peers) -> Iterator[tuple[Folder, Peers]]:
    """Open the folder of a run; the rank that holds most of the run writes to it, or rank 0 if none holds any.

    After a restart the ranks may be numbered differently, and only one machine needs to have the folder.

    Args:
        out: the folder.
        peers: the ranks.
    """
    if peers.size > 1:
        held = peers.each(lambda: _bytes_held(Folder(out)))
        peers = peers.led_by(held.index(max(held)))
    with Folder(out) if peers.leads else Follower(out) as folder:
        yield folder, peers


def _bytes_held(folder: Folder) -> int:
    """The size of a folder's journal in bytes; 0 if the run has none yet, -1 if there is no run."""
    if folder.journal.exists():
        return folder.journal.stat().st_size
    return 0 if folder.begun else -1


def shared(config: Config, peers: Peers, tell: Callable[[str], None], *, begins: bool) -> Config:
    """Decide what the ranks share, and the number of parts per batch, which is fixed for the run.

    Args:
        config: the run's settings.
        peers: the ranks.
        tell: called with a line for the user.
        begins: whether the run is new; a resumed run keeps its number of parts.
    """
    if peers.size == 1:
        if config.shard != "none":
            tell(f"one process holds all weights, so --shard {config.shard} divides nothing: start it with torchrun")
        return config.replace(shard="none")
    return peers.together(lambda: _shared(config, tell, begins, peers.size))


def _shared(config: Config, tell: Callable[[str], None], begins: bool, size: int) -> Config:
    """The part of :func:`shared` for several ranks."""
    if config.method == BACKPROPAGATION:
        raise ZeroBlockError("ft runs in one process: leave out torchrun, or take a zeroth-order method")
    if not config.trains:
        return config.replace(shard="none")
    if config.parallel is None:
        config = config.replace(parallel="data")
    assert config.parallel is not None
    tell(f"{size} ranks share {SHARED[config.parallel]} (--parallel {config.parallel})")
    from ..ranks import Ranks

    ranks = Ranks.of(config.parallel, probes=config.probes)
    assert ranks is not None
    rows, columns = len(ranks.grid), len(ranks.grid[0])
    if begins and config.shares is None and rows > 1:
        shares = -(-rows // config.accumulate)
        if shares > config.batch_size:
            raise ZeroBlockError(
                f"a batch of {config.batch_size} cannot be cut into parts for {rows} ranks: raise --batch-size to "
                f"{shares}, or use --parallel probes"
            )
        config = config.replace(shares=shares)
    parts = config.accumulate * (config.shares or 1)
    if config.shard != "none":
        _check_shards(config, rows, parts)
        tell(f"{rows} ranks share the weights, one shard each (--shard {config.shard})")
    if parts < rows:
        tell(f"{rows - parts} of {rows} ranks have nothing to measure: this run cuts a batch into {parts} (--shares)")
    if config.probes < columns:
        tell(
            f"{columns - config.probes} of {columns} ranks have nothing to measure: this run has {config.probes} probes"
        )
    return config


def _check_shards(config: Config, rows: int, parts: int) -> None:
    """Refuse settings that do not work with sharded weights, for which all ranks must take equally many passes."""
    refusals = {
        "needs several ranks that share the data: give --parallel data": rows == 1,
        f"needs the same number of batch parts (--shares) on every rank, but {parts} is not divisible by {rows}: start "
        f"a number of ranks that divides {parts}, or use --shard none": parts % rows,
        "is for the model's own weights: leave out --lora and --prefix": config.adapter is not None,
        "is for weights of 16 and 32 bits: leave out --weights": config.weights is not None,
        "is for the objective loss, which takes one pass per point": config.objective != "loss",
        "takes steps that cannot be captured: leave out --graphs on": config.graphs == "on",
        "divides the memory already: leave out --offload and --memory": bool(config.offload or config.memory),
        "does not split rows: leave out --max-tokens, and lower --batch-size": config.max_tokens is not None,
    }
    for reason, refused in refusals.items():
        if refused:
            raise ZeroBlockError(f"--shard {config.shard} {reason}")


def _spread(workload: Workload) -> Workload:
    """Shard the weights of every layer over the ranks that share the data."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from ..ranks import Ranks

    config, model = workload.config, workload.model
    ranks = Ranks.of(config.parallel, probes=config.probes)
    assert ranks is not None
    device = models.find_device(config.device).type
    mesh = init_device_mesh(device, (len(ranks.grid), len(ranks.grid[0])), mesh_dim_names=("data", "probes"))["data"]
    for stack in stacks(model):
        for layer in model.get_submodule(stack).children():
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    engine = engine_of(config.replace(max_tokens=UNSPLIT_TOKENS), model)
    return dataclasses.replace(
        workload, engine=engine, evaluator=dataclasses.replace(workload.evaluator, engine=engine)
    )


@contextlib.contextmanager
def measured_alike(config: Config) -> Iterator[None]:
    """Make a single process a group of one if the run shares its probes, so that it measures as several ranks do."""
    import torch.distributed as dist

    if dist.is_initialized() or "probes" not in (config.parallel or ""):
        yield
        return
    stores: Any = dist  # torch does not declare them as exports
    dist.init_process_group("gloo", store=stores.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def load(
    config: Config,
    peers: Peers,
    tell: Callable[[str], None],
    check: Callable[[Workload], None] = lambda workload: None,
    run: Path | None = None,
    out: Path = Path(),
) -> Workload:
    """Load the model and the data on every rank; an error names a rank whose model, data or version differ.

    Args:
        config: the run's settings on this rank.
        peers: the ranks.
        tell: called with a line about each stage.
        check: refuses data that are not the run's.
        run: the folder of a resumed run, which holds the start of a prefix.
        out: the folder that the run has or will have.
    """

    def mine() -> Workload:
        at = config if config.shard == "none" else config.replace(device="cpu")  # _spread shards it from there
        workload = dataclasses.replace(prepare(at, tell=tell, folder=out), config=config)
        check(workload)
        return workload

    if peers.size == 1:
        return mine()
    peers.agree({"zeroblock": __version__, "torch": torch.__version__}, "install the same version on all of them")
    settings = dataclasses.asdict(config)
    own = {*EXECUTION, *OWN} - {*COMMON}
    common = {name: value for name, value in settings.items() if name not in own}
    peers.agree({f"the setting {name}": value for name, value in common.items()}, "give all of them the same settings")
    workload = peers.together(mine)
    if config.prefix is not None:
        _share_start(workload, peers, run)
    peers.agree(
        {
            "a base model with the fingerprint": fingerprint(workload.model),
            "training data with the fingerprint": workload.fingerprint,
            "evaluated rows with the fingerprint": workload.exam_digest,
        },
        "give all of them the same model and data",
    )
    return workload if config.shard == "none" else _spread(workload)


def _share_start(workload: Workload, peers: Peers, run: Path | None) -> None:
    """Start a prefix from the leader's values, because machines differ in the last bits."""
    trained = [param for param in workload.model.parameters() if param.requires_grad]

    def start() -> list[torch.Tensor]:
        if run is not None:
            adapter.restart_(workload.model, run)
        return [param.detach().cpu() for param in trained]

    values = peers.first(start)
    with torch.no_grad():
        for param, value in zip(trained, values, strict=True):
            param.copy_(value)
