"""Run the jobs of a study in several processes and report each one that is done."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import torch

Job = Callable[[], Any]
"""A ``functools.partial`` of a module's function, so that it pickles."""


def _single_thread() -> None:
    torch.set_num_threads(1)  # the processes are the parallelism: at d = 256 a second thread costs more than it gains


@contextlib.contextmanager
def _ignored() -> Iterator[None]:
    """Processes that start within this context ignore Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _call(job: Job) -> Any:
    return job()


@dataclasses.dataclass
class Runner:
    """Runs jobs and returns their results in order.

    Args:
        workers: number of processes; 1 runs the jobs in this one.
        tick: called after each job.
    """

    workers: int = 1
    tick: Callable[[], None] = lambda: None
    _pool: concurrent.futures.ProcessPoolExecutor | None = dataclasses.field(default=None, repr=False)

    @staticmethod
    def cores() -> int:
        """The number of processes worth starting: one per core that this process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def __enter__(self) -> Self:
        if self.workers > 1:
            context = multiprocessing.get_context("spawn")  # a fork of a process that has run torch can hang
            self._pool = concurrent.futures.ProcessPoolExecutor(self.workers, context, _single_thread)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            if kind is not None:  # no one waits for the running jobs; Python 3.14 has terminate_workers
                for process in list((self._pool._processes or {}).values()):
                    process.terminate()
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def __call__(self, jobs: Sequence[Job]) -> list[Any]:
        if self._pool is None:
            return [self._here(job) for job in jobs]
        with _ignored():  # processes start here; Ctrl-C reaches this process, which ends them
            futures = [self._pool.submit(_call, job) for job in jobs]
        for _ in concurrent.futures.as_completed(futures):
            self.tick()
        return [future.result() for future in futures]

    def _here(self, job: Job) -> Any:
        before = torch.get_num_threads()
        _single_thread()
        try:
            return job()
        finally:
            torch.set_num_threads(before)
            self.tick()
