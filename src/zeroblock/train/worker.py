"""Workers: processes that make one run after another, so that a crash costs one run and imports are paid once.

A worker reads jobs from its standard input, one JSON object a line, and answers each with
one line.  When its input closes, because the sweep was stopped or killed, it stops its run
as Ctrl-C would.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import tomllib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import ZeroBlockError
from .config import Config
from .outcome import Outcome, due, folder_of, read
from .sweep import Run, Sweep

PATIENCE = 30.0
"""Seconds that a stopped worker has to end its step."""

Tell = Callable[[str, Run, Outcome | None, str], None]
"""Called with "begin", "end" or "fail", the run, its outcome, and why it failed."""


class Worker:
    """A process that makes runs, from the outside.

    Args:
        threads: of its arithmetic, unless the environment says; None for as many as torch takes.
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
        """Whether it takes another run."""

    def make(self, run: Run, folder: Path, log: Path) -> str:
        """Make a run to its end.

        Args:
            run: which.
            folder: its folder.
            log: takes what the run prints.

        Returns:
            why it failed; empty where it did not.
        """
        job = {"config": run.config.dump(), "folder": str(folder), "log": str(log)}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except (BrokenPipeError, ValueError):  # it died, or was closed from another thread
            answer = ""
        if not answer:
            self.alive = False
            return f"its process ended with status {self.process.wait()}; see {log}"
        said = json.loads(answer)
        self.alive = said["sound"]
        return str(said["error"])

    def stop(self) -> None:
        """Ask it to stop its run and end."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def close(self) -> None:
        """Stop it and see that it has ended."""
        self.stop()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Crew:
    """Makes all runs of a sweep, some at a time.

    Args:
        sweep: what is wanted.
        folder: run folders are made under its ``runs``, what they print under its ``log``.
        jobs: how many at a time.
        tell: hears of every begin and end, one at a time.
    """

    def __init__(self, sweep: Sweep, folder: Path, jobs: int, tell: Tell) -> None:
        self.sweep, self.runs, self.logs, self.jobs, self.tell = sweep, folder / "runs", folder / "log", jobs, tell
        self.outcomes = read(sweep, self.runs)
        self.failed: dict[str, str] = {}
        self.running: set[str] = set()
        self.changed = threading.Condition()
        self.workers: list[Worker] = []
        self.stopped = False
        self.error: Exception | None = None

    def make(self) -> None:
        """Make every run that is not finished; those that fail are in ``failed``, the others go on."""
        self.runs.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(exist_ok=True)
        threads = [threading.Thread(target=self._serve) for _ in range(self.jobs)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            self._stop()
            for worker in self.workers:
                worker.close()
            for thread in threads:
                thread.join()
            raise
        if self.error is not None:
            raise self.error

    def _serve(self) -> None:
        """One thread: a worker, and runs for it while there are any."""
        worker: Worker | None = None
        try:
            while run := self._take():
                if worker is None or not worker.alive:
                    if worker is not None:
                        worker.close()
                    worker = self._hire()
                folder = folder_of(run, self.runs)
                error = worker.make(run, folder, self.logs / f"{run.name}.txt")
                self._note(run, None if error else Outcome.read(folder), error)
        except Exception as error:  # a full disk, a closed pipe: nothing of one run, so all stop
            self.error = error
            self._stop()
        finally:
            if worker is not None:
                worker.close()

    def _stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()
            for worker in self.workers:
                worker.stop()

    def _hire(self) -> Worker:
        with self.changed:
            worker = Worker(max(1, (os.cpu_count() or 1) // self.jobs) if self.jobs > 1 else None)
            self.workers.append(worker)
            if self.stopped:
                worker.stop()
            return worker

    def _take(self) -> Run | None:
        """The next run; waits while only runs under way can tell what is next."""
        with self.changed:
            while not self.stopped:
                ready = [run for run in due(self.sweep, self.outcomes, self.failed) if run.name not in self.running]
                if ready:
                    self.running.add(ready[0].name)
                    self.tell("begin", ready[0], None, "")
                    return ready[0]
                if not self.running:
                    return None
                self.changed.wait()
        return None

    def _note(self, run: Run, outcome: Outcome | None, error: str) -> None:
        with self.changed:
            self.running.discard(run.name)
            if outcome is not None:
                self.outcomes[run.name] = outcome
                self.tell("end", run, outcome, "")
            elif not self.stopped:
                self.failed[run.name] = error or "it ended before its last step"
                self.tell("fail", run, None, self.failed[run.name])
            self.changed.notify_all()


def main() -> None:
    """The inside of a worker."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # inherited as ignored from a shell's background
    jobs: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    from .shelf import keeping

    with contextlib.suppress(KeyboardInterrupt), keeping():
        while job := jobs.get():
            error, sound = "", True
            with _printing_to(Path(job["log"])):
                try:
                    error = _make(job["config"], Path(job["folder"]))
                except ZeroBlockError as mistake:
                    error = str(mistake)
                except Exception as mistake:
                    traceback.print_exc()
                    error, sound = f"{type(mistake).__name__}: {mistake}", False
            try:
                print(json.dumps({"error": error, "sound": sound}), file=answers, flush=True)
            except BrokenPipeError:  # nobody asks any more
                return
            if not sound:
                sys.exit(1)  # memory or device may be in any state: the next run gets a fresh process


def _make(config: str, folder: Path) -> str:
    """Make a run, or what is left of it; why it stopped, where it did."""
    import torch

    from .loop import make
    from .view import view

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # peaks are of the run, not of those before it
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return make(Config.of(tomllib.loads(config)), folder, view(quiet=False, json=False)).reason


def _listen(jobs: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    jobs.put(None)
    _thread.interrupt_main()


@contextlib.contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    """Send all that this process prints, C code included, to the end of a file."""
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
