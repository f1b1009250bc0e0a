"""A pool of ranks: processes with a gloo group, which are started once and run many cases.

>>> with Pool(4) as pool:                                                   # doctest: +SKIP
...     results = pool.run(case, "mezo", size=2)    # case("mezo") in ranks 0 and 1, in rank order

A case is a function of a module that the workers can import.  It finds its ranks by :func:`layout`.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Self

import torch
import torch.distributed as dist

from toy import PATIENCE_S
from zeroblock.ranks import Ranks

ALONE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
"""The environment of a worker: one thread, and no interface but the local one."""
_groups: dict[int, Any] = {}
"""In a worker: the group of the first n ranks, by n."""
_stores: list[Any] = []
"""In a worker: the store that it shares with the test."""


class Failure(Exception):  # noqa: N818
    """A case that raised: the type's name, the message and the traceback of the rank's exception."""

    def __init__(self, rank: int, kind: str, message: str, trace: str) -> None:
        super().__init__(rank, kind, message, trace)
        self.rank, self.kind, self.message = rank, kind, message


class Pool:
    """Some ranks that wait for cases.

    Args:
        size: how many.
        timeout_s: of their collectives.
        preload: modules that the ranks import before they start, together in one process.
    """

    def __init__(self, size: int = 4, timeout_s: float = PATIENCE_S, preload: Sequence[str] = ()) -> None:
        self.size = size
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")  # imports torch once, and forks without threads
        context.set_forkserver_preload(["pool", "zeroblock.train.loop", "zeroblock.ops.noise.cpu", *preload])
        self.pipes: list[Connection] = []
        self.processes = []
        with _environment({**ALONE, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}):
            for rank in range(size):
                here, there = context.Pipe()
                process = context.Process(
                    target=_work, args=(rank, size, self.store.port, timeout_s, there), daemon=True
                )
                process.start()
                there.close()
                self.pipes.append(here)
                self.processes.append(process)

    def run(self, case: Callable[..., Any], *args: Any, size: int | None = None, **options: Any) -> list[Any]:
        """The results of a case in the first ``size`` ranks; raises the first rank's failure, once all have ended."""
        outcomes = self.outcomes(case, *args, size=size, **options)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return outcomes

    def outcomes(self, case: Callable[..., Any], *args: Any, size: int | None = None, **options: Any) -> list[Any]:
        """The same with failures in the places of results."""
        self.send(case, *args, size=size, **options)
        return [self.answer(rank) for rank in range(self.size if size is None else size)]

    def send(self, case: Callable[..., Any], *args: Any, size: int | None = None, **options: Any) -> None:
        """Start a case, whose outcomes ``answer`` waits for."""
        for pipe in self.pipes[:size]:
            pipe.send((case, args, options))

    def answer(self, rank: int) -> Any:
        """The outcome of one rank, whatever becomes of the others."""
        if not self.pipes[rank].poll(PATIENCE_S):
            raise TimeoutError(f"rank {rank} hangs")
        return pickle.loads(self.pipes[rank].recv_bytes())

    def wait(self, *keys: str) -> None:
        """Wait until ranks have noted these words."""
        self.store.wait(list(keys), datetime.timedelta(seconds=PATIENCE_S))

    def close(self) -> None:
        """End every rank."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def layout(size: int, probes: int = 1, by_probe: bool = True, every: int = 1000) -> Ranks:
    """In a worker: the first ``size`` ranks, ``probes`` of which share the probes; the rest share the data."""
    grid = tuple(tuple(range(d, d + probes)) for d in range(0, size, probes))
    return Ranks(_groups[size], grid, by_probe=by_probe and (probes > 1 or size == 1), every=every)


def group(size: int) -> Any:
    """In a worker: the process group of the first ``size`` ranks."""
    return _groups[size]


def note(key: str) -> None:
    """In a worker: tell the test, which may wait for it."""
    _stores[-1].set(key, "")


def _work(rank: int, size: int, port: int, timeout_s: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # whatever this rank waits for
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    _stores.append(store)
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    _groups.update({n: dist.group.WORLD if n == size else dist.new_group(list(range(n))) for n in range(1, size + 1)})
    while True:
        try:
            request = pipe.recv()
        except (EOFError, OSError):
            break
        if request is None:
            break
        case, args, options = request
        try:
            outcome = case(*args, **options)
        except BaseException as error:
            outcome = Failure(rank, type(error).__name__, str(error), traceback.format_exc())
        pipe.send_bytes(pickle.dumps(outcome))  # tensors by value
    os._exit(0)  # the group of ranks that died cannot be destroyed in an orderly way


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
