"""Runs on Ray: one task per run, on this machine or on a cluster's.

A task whose process or node dies is started again by Ray, on any node, and continues the journal in the run's
folder.  So the folder must be on a disk that all nodes share; a node that does not see it reports an error.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..errors import ZeroBlockError
from .plan import Run
from .worker import Job, job_of, perform

MAX_RETRIES = 5
"""Restarts of a run whose process or node dies."""
SHARED = ".shared"
"""A file next to the logs, which proves that a node sees the folder."""


class Cluster:
    """A context manager that joins a Ray cluster, or starts Ray on this machine and shuts it down again.

    Args:
        folder: the sweep's folder, on a disk that all nodes share.
        address: the cluster's address, such as ``auto`` or ``ray://host:10001``; None starts Ray on this machine alone.
        cpus: cores per run.
        gpus: GPUs per run, possibly a fraction; None means one if the cluster has any, else zero.

    >>> with Cluster(Path("runs/find-lr")) as cluster:                           # doctest: +SKIP
    ...     Crew(sweep, folder, cluster.slots, tell, cluster.hire).make()
    """

    def __init__(self, folder: Path, address: str | None = None, cpus: float = 1.0, gpus: float | None = None) -> None:
        self.folder, self.address, self.cpus, self.gpus = folder, address, cpus, gpus
        self.token = secrets.token_hex(8)
        self.slots = 1
        """The number of runs that fit at a time."""
        self._task: Any = None

    def __enter__(self) -> Self:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray sends usage statistics
        try:
            import ray
        except ImportError as error:
            raise ZeroBlockError("--executor ray needs Ray: pip install 'zeroblock[ray]'") from error
        given: dict[str, Any] = {"address": self.address} if self.address else {"address": "local"}
        if self.address is None:
            given |= {"include_dashboard": False, "num_cpus": os.cpu_count()}
        try:
            ray.init(**given, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError) as error:
            where = f"at {self.address}" if self.address else "on this machine"
            raise ZeroBlockError(f"no Ray {where} ({' '.join(str(error).split())}): check --address") from error
        try:
            self._settle(ray.cluster_resources())
        except BaseException:
            ray.shutdown()
            raise
        options = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_retries": MAX_RETRIES}
        self._task = ray.remote(**options)(_perform)
        logs = self.folder / "log"
        logs.mkdir(parents=True, exist_ok=True)
        (logs / SHARED).write_text(self.token, encoding="utf-8")
        return self

    def _settle(self, resources: dict[str, float]) -> None:
        """Decide how many runs fit at a time; refuse runs that never will."""
        cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
        if self.gpus is None:
            self.gpus = 1.0 if gpus else 0.0
        if self.cpus > cpus or self.gpus > gpus:
            raise ZeroBlockError(
                f"a run asks for {self.cpus:g} cores and {self.gpus:g} GPUs, and this Ray has {cpus:g} and {gpus:g}: "
                "lower --cpus or --gpus"
            )
        fits = [have / want for have, want in ((cpus, self.cpus), (gpus, self.gpus)) if want]
        self.slots = max(1, int(min(fits, default=1.0)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import ray

        ray.shutdown()
        with contextlib.suppress(OSError):
            (self.folder / "log" / SHARED).unlink()

    def hire(self) -> Task:
        """Return one more hand."""
        return Task(self._task, self.token)


class Task:
    """Makes runs as tasks of Ray, one after another.

    Args:
        task: the remote function.
        token: the content of the file that proves that a node sees the folder.
    """

    def __init__(self, task: Any, token: str) -> None:
        self.alive = True
        self._task, self._token = task, token
        self._current: Any = None
        self._lock = threading.Lock()

    def make(self, run: Run, folder: Path, log: Path) -> str:
        """Make a run to its end, even if nodes die on the way; return why it failed, empty if it did not."""
        import ray

        job = job_of(run, folder.resolve(), log.resolve()) | {"token": self._token, "cwd": os.getcwd()}
        with self._lock:
            if not self.alive:
                return "cancelled"
            current = self._current = self._task.options(name=run.name).remote(job)
        try:
            return str(ray.get(current)["error"])
        except ray.exceptions.TaskCancelledError:
            return "cancelled"
        except ray.exceptions.RayError as error:
            return f"Ray gave up on this run ({' '.join(str(error).split())}); see {log}"
        finally:
            self._current = None

    def stop(self) -> None:
        """Cancel the run: its process ends the step and keeps the journal, as on Ctrl-C."""
        import ray

        with self._lock:
            current, self.alive = self._current if self.alive else None, False
        if current is not None:  # once: a second signal would not wait for the step
            ray.cancel(current)

    def close(self) -> None:
        """Cancel the run; :meth:`make` returns when its process has stopped."""
        self.stop()

    def kill(self) -> None:
        """Cancel the run; Ray ends its process when this one leaves the cluster."""
        self.stop()


def _perform(job: Job) -> Job:
    """Make a run on a node of the cluster."""
    log = Path(job["log"])
    try:
        shared = (log.parent / SHARED).read_text(encoding="utf-8") == job["token"]
    except OSError:
        shared = False
    if not shared:
        error = (
            f"the node {socket.gethostname()} does not see {log.parent.parent}: give --out a folder on a disk that "
            "all nodes share"
        )
        return {"error": error, "sound": True}
    if Path(job["cwd"]).is_dir():  # relative paths of models and data start there
        os.chdir(job["cwd"])
    return perform(job)
