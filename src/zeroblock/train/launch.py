"""Starting on many ranks: reads the environment that torchrun sets, and makes the process group from it."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import ZeroBlockError
from .peers import RankError

POLL_SECONDS = 0.02
FAREWELL_SECONDS = 5.0
"""Seconds that a rank waits for the others when an error ends all ranks."""
COMMAND = "torchrun --standalone --nproc-per-node 4 -m zeroblock train …"
"""The command that starts a run on several ranks, for messages."""


@dataclass(frozen=True)
class Launch:
    """A process as torchrun started it.

    >>> Launch.of({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}).size
    4

    Args:
        rank: the rank of this process.
        size: the number of processes.
        local: the number of this process on its machine.
        local_size: the number of processes on its machine.
    """

    rank: int
    size: int
    local: int
    local_size: int

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Launch | None:
        """Read the environment; None in a process that was started alone."""
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return None
        try:
            rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            local = int(environment.get("LOCAL_RANK", rank))
            local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
        except ValueError as error:
            raise ZeroBlockError(f"RANK, WORLD_SIZE and LOCAL_RANK must be numbers ({error}): use {COMMAND}") from error
        return cls(rank, size, local, local_size)

    @contextlib.contextmanager
    def joined(self, device: str, timeout: float, *, alone: bool = False) -> Iterator[None]:
        """Join the other ranks, each on its own device if there are enough.

        Args:
            device: the setting of that name; ``cuda`` and ``auto`` become the GPU with this process's number.
            timeout: seconds after which a rank that does not answer counts as lost.
            alone: whether a single process makes a group as well.
        """
        if self.size == 1 and not alone:
            yield
            return
        import torch
        import torch.distributed as dist

        from ..model import find_device

        stores: Any = dist  # torch does not declare them as exports
        backend = "gloo"
        if (place := find_device(device)).type == "cuda":
            if place.index is not None:
                raise ZeroBlockError(f"every rank takes a GPU of its own: use --device cuda, not {device}")
            count = torch.cuda.device_count()
            torch.cuda.set_device(self.local % count)
            if self.local_size <= count:  # NCCL takes one process per GPU
                backend = "cpu:gloo,cuda:nccl"
        try:
            store: Any = stores.PrefixStore(self._round(whole := self._store(timeout), timeout), whole)
            wait = datetime.timedelta(seconds=timeout)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=wait)
        except (RuntimeError, ValueError, KeyError) as error:
            raise ZeroBlockError(
                f"rank {self.rank} cannot join the others ({' '.join(str(error).split())[:300]}): start all of them "
                f"with {COMMAND}"
            ) from error
        try:
            yield
        except RankError:
            self.part(store)
            raise
        dist.destroy_process_group()  # not after an error: with a group that lost a rank it may abort the process

    def part(self, store: Any) -> None:
        """Wait until all ranks have reached the error that ends them, because torchrun terminates the others.

        Args:
            store: the key-value store of this start of the ranks.
        """
        end = time.monotonic() + FAREWELL_SECONDS
        with contextlib.suppress(Exception):
            there = store.add("parted", 1)
            while there < self.size and time.monotonic() < end:
                time.sleep(POLL_SECONDS)
                there = store.add("parted", 0)

    def _store(self, timeout: float) -> Any:
        """The key-value store at the address in the environment; torchrun's agent holds it, otherwise rank 0."""
        import torch.distributed as dist

        stores: Any = dist
        held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return stores.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), self.size, not held and self.rank == 0,
            datetime.timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=not held,
        )  # fmt: skip

    def _round(self, store: Any, timeout: float) -> str:
        """A name for this start of the ranks that no other start has.

        After a restart torchrun (torch 2.13) hands out the same store, with everything that the previous ranks
        wrote to it, and ranks that read each other's old addresses there wait forever.  So every rank writes a random
        word, rank 0 publishes all words, and the ranks continue when each has found its own among them.
        """
        word, seen = secrets.token_hex(8), ""
        store.set(f"zeroblock/word/{self.rank}", word)
        keys = [f"zeroblock/word/{rank}" for rank in range(self.size)]
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self.rank == 0 and store.check(keys):
                store.set("zeroblock/words", b" ".join(store.multi_get(keys)))
            words = store.get("zeroblock/words").decode() if store.check(["zeroblock/words"]) else ""
            name = f"zeroblock/{hashlib.sha256(words.encode()).hexdigest()[:16]}"
            if words and words.split()[self.rank : self.rank + 1] == [word]:
                there = store.add(name, 0 if words == seen else 1)
                seen = words
                if there >= self.size:
                    return name
            time.sleep(POLL_SECONDS)
        raise ZeroBlockError(f"the other ranks did not come within {timeout:g} s: start all {self.size} of them")


def leave(code: int) -> NoReturn:
    """End this process; a rank that failed exits at once, so that nothing replaces its exit status.

    torchrun sends SIGTERM to ranks that outlive another one, and the threads of a process group that not all ranks
    closed may abort the interpreter while it exits.

    Args:
        code: the exit status.
    """
    if not code or os.environ.get("WORLD_SIZE", "1") == "1" or "RANK" not in os.environ:
        sys.exit(code)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a broken pipe or a closed stream
            stream.flush()
    os._exit(code)
