"""Workers: processes that make one run after another, so that a crash costs one run and imports happen once.

A worker reads jobs from its standard input, one JSON object per line, and answers each with
one line.  When its input closes, because the sweep was stopped or killed, it stops its run
as Ctrl-C would.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import tomllib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ZeroBlockError
from ..train.config import Config
from .plan import Run

Job = dict[str, Any]
"""The description of a run that a process receives, or its answer."""

STOP_SECONDS = 30.0
"""Seconds that a stopped worker may take to end its step."""


class Worker:
    """A process that makes runs, seen from the sweep.

    Args:
        threads: the number of threads, unless the environment sets it; None leaves it to torch.
    """

    def __init__(self, threads: int | None) -> None:
        limits = {} if threads is None else {name: str(threads) for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env=limits | os.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C reaches the sweep alone, which then stops its workers
        )
        self.alive = True
        """Whether it can make another run."""

    def make(self, run: Run, folder: Path, log: Path) -> str:
        """Make a run to its end.

        Args:
            run: the run.
            folder: its folder.
            log: a file for everything the run prints.

        Returns:
            why the run failed; empty if it did not.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(job_of(run, folder, log)) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except (BrokenPipeError, ValueError):  # it died, or was closed from another thread
            answer = ""
        if not answer:
            self.alive = False
            return f"its process ended with status {self.process.wait()}; see {log}"
        result = json.loads(answer)
        self.alive = result["sound"]
        return str(result["error"])

    def stop(self) -> None:
        """Ask it to stop its run and end."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def close(self) -> None:
        """Stop it and wait until it has ended."""
        self.stop()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it at once, in the middle of a step; the journal keeps the steps before."""
        self.process.kill()
        self.process.wait()


def main() -> None:
    """Run as a worker: make the runs that arrive on standard input."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
    jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    from ..train.cache import caching

    with contextlib.suppress(KeyboardInterrupt), caching():
        while job := jobs.get():
            answer = perform(job)
            try:
                print(json.dumps(answer), file=answers, flush=True)
            except BrokenPipeError:  # the sweep is gone
                return
            if not answer["sound"]:
                sys.exit(1)  # memory or device may be in any state: the next run gets a fresh process


def job_of(run: Run, folder: Path, log: Path) -> Job:
    """Describe a run for the process that makes it.

    Args:
        run: the run.
        folder: its folder.
        log: a file for everything the run prints.
    """
    job = {"config": run.config.dump(), "folder": str(folder), "log": str(log), "maker": run.maker or __name__}
    return job | dict(run.more)


def perform(job: Job) -> Job:
    """Make a run, or the rest of it, in this process.

    Args:
        job: the result of :func:`job_of`.

    Returns:
        ``error``: why the run failed, empty if it did not; ``sound``: whether this process can make another.
    """
    with _printing_to(Path(job["log"])):
        try:
            maker = importlib.import_module(job["maker"])
            return {"error": maker.make(job), "sound": True}
        except ZeroBlockError as mistake:
            return {"error": str(mistake), "sound": True}
        except Exception as mistake:
            traceback.print_exc()
            return {"error": f"{type(mistake).__name__}: {mistake}", "sound": False}


def make(job: Job) -> str:
    """Make a run, or the rest of it; return why it was stopped, empty if it was not.

    Args:
        job: the result of :func:`job_of`.
    """
    import torch

    from ..report.view import view
    from ..train import loop
    from .clock import CLOCK, Clock

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # the peak of this run, not of the runs before it
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    folder = Path(job["folder"])
    shows = Clock(view(quiet=False, json=False), folder / CLOCK)
    return loop.make(Config.of(tomllib.loads(job["config"])), folder, shows).reason


def _listen(jobs: queue.SimpleQueue[Job | None]) -> None:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    jobs.put(None)
    _thread.interrupt_main()


@contextlib.contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    """Append everything that this process prints, C code included, to a file."""
    with open(path, "a", encoding="utf-8") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


if __name__ == "__main__":
    main()
