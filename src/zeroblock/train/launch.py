"""Starting on many ranks: the environment that torchrun gives to a process, and the process group made of it."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..errors import ZeroBlockError

COMMAND = "torchrun --standalone --nproc-per-node 4 -m zeroblock train …"
"""How to start a run on several ranks, for messages."""


@dataclass(frozen=True)
class Launch:
    """A process as torchrun started it.

    >>> Launch.of({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}).size
    4

    Args:
        rank: of this process among all.
        size: how many processes there are.
        local: the number of this process on its machine.
        local_size: how many there are on its machine.
        restarts: how often torchrun has started the ranks again.
    """

    rank: int
    size: int
    local: int
    local_size: int
    restarts: int

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Launch | None:
        """What the environment says; None in a process that was started alone."""
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return None
        try:
            rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            local = int(environment.get("LOCAL_RANK", rank))
            local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
            restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", 0))
        except ValueError as error:
            raise ZeroBlockError(f"RANK, WORLD_SIZE and LOCAL_RANK must be numbers ({error}): use {COMMAND}") from error
        return cls(rank, size, local, local_size, restarts)

    @contextlib.contextmanager
    def joined(self, device: str, timeout: float) -> Iterator[None]:
        """Join the other ranks, each on a device of its own where there are enough.

        Args:
            device: the setting of that name; ``cuda`` and ``auto`` become the GPU with this process's number.
            timeout: seconds after which a rank that does not answer is lost.
        """
        if self.size == 1:
            yield
            return
        import torch
        import torch.distributed as dist

        from ..model import find_device

        backend = "gloo"
        if (place := find_device(device)).type == "cuda":
            if place.index is not None:
                raise ZeroBlockError(f"every rank takes a GPU of its own: use --device cuda, not {device}")
            count = torch.cuda.device_count()
            torch.cuda.set_device(self.local % count)
            if self.local_size <= count:  # NCCL takes one process per GPU
                backend = "cpu:gloo,cuda:nccl"
        try:
            dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
        except (RuntimeError, ValueError) as error:
            raise ZeroBlockError(
                f"rank {self.rank} cannot join the others ({' '.join(str(error).split())[:300]}): start all of them "
                f"with {COMMAND}"
            ) from error
        try:
            yield
        finally:
            with contextlib.suppress(Exception):  # a group that lost a rank
                dist.destroy_process_group()
