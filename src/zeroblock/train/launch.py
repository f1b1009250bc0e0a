"""Starting on many ranks: the environment that torchrun gives to a process, and the process group made of it."""

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
"""Seconds that a rank which ends with an error of all ranks waits for the others to get as far."""
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
    """

    rank: int
    size: int
    local: int
    local_size: int

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Launch | None:
        """What the environment says; None in a process that was started alone."""
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
        """Join the other ranks, each on a device of its own where there are enough.

        Args:
            device: the setting of that name; ``cuda`` and ``auto`` become the GPU with this process's number.
            timeout: seconds after which a rank that does not answer is lost.
            alone: whether one process makes a group, too.
        """
        if self.size == 1 and not alone:
            yield
            return
        import torch
        import torch.distributed as dist

        from ..model import find_device

        stores: Any = dist  # torch does not say that it exports them
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
        dist.destroy_process_group()  # after an error the process ends, and a group that lost a rank may abort it

    def part(self, store: Any) -> None:
        """Wait until all ranks have come to the error that ends them: torchrun terminates those that have not.

        Args:
            store: of this start of the ranks.
        """
        end = time.monotonic() + FAREWELL_SECONDS
        with contextlib.suppress(Exception):
            there = store.add("parted", 1)
            while there < self.size and time.monotonic() < end:
                time.sleep(POLL_SECONDS)
                there = store.add("parted", 0)

    def _store(self, timeout: float) -> Any:
        """The key-value store at the address that the environment names; torchrun's agent holds it, or else rank 0."""
        import torch.distributed as dist

        stores: Any = dist
        held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return stores.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), self.size, not held and self.rank == 0,
            datetime.timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=not held,
        )  # fmt: skip

    def _round(self, store: Any, timeout: float) -> str:
        """A name for this start of the ranks, which no other start has.

        After a restart torchrun (torch 2.13) hands out the same store, with everything that the ranks before had
        written into it: ranks that read one another's old addresses there wait for ever.  So every rank writes a
        random word, rank 0 publishes the words of all, and the ranks go on when all have found their own in it.
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
    """End this process; a rank that failed ends at once, so that nothing but its own status ends it.

    torchrun sends SIGTERM to ranks that live on after another one, and the threads of a process group that was
    not closed by all ranks may abort the interpreter while it ends.

    Args:
        code: the exit status.
    """
    if not code or os.environ.get("WORLD_SIZE", "1") == "1" or "RANK" not in os.environ:
        sys.exit(code)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a pipe whose reader has gone, a stream that was closed
            stream.flush()
    os._exit(code)
