"""The run folder: the files of a run, written while it runs.

config.toml     the configuration; its first line is the command that runs it again
journal.zbj     the journal, for zeroth-order methods
metrics.jsonl   one evaluation per line
steps.csv       one step per line
checksums.jsonl the checksums of the weights that all ranks agreed on, if there were several
about.json      machine, versions and blocks
summary.json    the result, once the run has finished; summary.md and figures/ for people
report.html     the run so far, for people; rewritten at every evaluation
snapshot/       weights and optimizer state of some step, if asked for
model/          weights of the dev-selected step for from_pretrained, for ft
adapter/        the adapter of the selected step, as PEFT saves it, if one is trained; start/ is a prefix at step 0
.lock           held by the process that writes
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, Self

from .. import atomic, lock
from ..errors import ZeroBlockError, ZeroBlockWarning
from ..evaluate.measurement import Measurement, plain, read_measurements
from ..record import Record
from ..report.summary import MODEL, check_summary
from .config import BACKPROPAGATION, Config, recorded


class Folder:
    """A run folder, as a context manager that releases its lock.

    Args:
        path: the folder's path.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.measurements: list[Measurement] = []
        self._splits: dict[int, set[str]] = {}
        self._lock: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            lock.release(self._lock)
            self._lock = None

    @property
    def journal(self) -> Path:
        """The path of the journal."""
        return self.path / "journal.zbj"

    @property
    def snapshot(self) -> Path:
        """The path of the snapshot."""
        return self.path / "snapshot"

    @property
    def model(self) -> Path:
        """The path of the weights that ``ft`` keeps."""
        return self.path / MODEL

    def config(self, *, trust_remote_code: bool = False) -> Config:
        """Read the configuration of the run.

        Args:
            trust_remote_code: whether the model's own code may run; the folder's own value is ignored.
        """
        file = self.path / "config.toml"
        if not file.is_file():
            raise ZeroBlockError(
                f"{self.path} holds no run (no config.toml): zeroblock train --out {self.path} makes one"
            )
        return recorded(file, trust_remote_code=trust_remote_code)

    def summary(self) -> dict[str, Any] | None:
        """Read the result; None if the run has not finished."""
        file = self.path / "summary.json"
        try:
            return check_summary(json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as error:
            raise ZeroBlockError(
                f"{file} is damaged ({error}): remove it, then zeroblock resume {self.path}"
            ) from error

    @property
    def begun(self) -> bool:
        """Whether the folder holds a run."""
        return (self.path / "config.toml").exists() or self.journal.exists()

    def refuse(self) -> None:
        """Raise an error if the folder already holds a run."""
        if self.begun:
            raise ZeroBlockError(
                f"{self.path} holds a run already: zeroblock resume {self.path}, or give another --out"
            )

    def lock(self) -> None:
        """Make this process the only writer until the end of the context; an error if another process writes."""
        if self._lock is not None:
            return
        with self.writing():
            self._lock = lock.acquire(self.path)
            atomic.remove_drafts(self.path)

    def create(self, config: Config, again: bool = False) -> None:
        """Make the folder with its configuration, and lock it.

        Args:
            config: the resolved configuration.
            again: drop the files of a run that cannot be continued.
        """
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
        self.lock()
        if not again:
            self.refuse()
            for place, writes in (
                (self.snapshot, config.snapshot_every),
                (self.model, config.method == BACKPROPAGATION and config.save_weights),
            ):
                if writes and place.exists():
                    raise ZeroBlockError(f"{place} exists and is not this run's: give another --out")
        with self.writing():
            (self.path / "metrics.jsonl").unlink(missing_ok=True)
            (self.path / "steps.csv").unlink(missing_ok=True)
            (self.path / "checksums.jsonl").unlink(missing_ok=True)
            first = f"# zeroblock train --config {self.path / 'config.toml'} --out DIR"
            atomic.write(self.path / "config.toml", f"{first}\n{config.dump()}")

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A context that turns a full disk, or a folder that cannot be written, into a one-line error."""
        try:
            yield
        except BrokenPipeError:  # from the terminal, not from a file
            raise
        except OSError as error:
            advice = f"then zeroblock resume {self.path}" if self.journal.exists() else "or give another --out"
            cure = "remove the link" if error.errno == errno.ELOOP else "check the disk"
            raise ZeroBlockError(
                f"cannot write to {self.path} ({error.strerror or error}): {cure}, {advice}"
            ) from error

    def reopen(self, records: Iterable[Record], steps: int) -> str:
        """Bring the files back to the journal's last step.

        Measurements after that step, or after a damaged line, are dropped and made again.

        Args:
            records: the journal's records.
            steps: the number of records.

        Returns:
            a note about damaged lines; empty if there are none.
        """
        kept, note = [], ""
        try:
            for line, measurement in read_measurements(self.path / "metrics.jsonl"):
                if measurement.step <= steps:
                    kept.append(line)
                    self.add(measurement)
        except ValueError as error:
            note = f"metrics.jsonl is damaged ({error}): evaluations from there on are made again"
        with self.writing():
            atomic.write(self.path / "metrics.jsonl", b"".join(kept))
            atomic.write(self.path / "steps.csv", _rows(records, header=True))
        return note

    def measured(self, measurement: Measurement) -> None:
        """Add an evaluation, and append it to ``metrics.jsonl``."""
        self.add(measurement)
        with atomic.append(self.path / "metrics.jsonl") as file:
            file.write(json.dumps(measurement.line()).encode() + b"\n")

    def add(self, measurement: Measurement) -> None:
        """Add an evaluation in memory."""
        self.measurements.append(measurement)
        self._splits.setdefault(measurement.step, set()).add(measurement.split)

    def hear(self, measurements: Iterable[Measurement]) -> None:
        """Take over measurements that another rank has read; nothing to do here, this rank has read its own."""

    def splits_at(self, step: int) -> set[str]:
        """The splits that have been measured after a step."""
        return self._splits.get(step, set())

    def add_steps(self, records: Iterable[Record]) -> None:
        """Append steps to ``steps.csv``; the coefficient is the mean over the probes."""
        with atomic.append(self.path / "steps.csv") as file:
            file.write(_rows(records, header=file.tell() == 0).encode())

    def agreed(self, step: int, checksum: int, ranks: int) -> None:
        """Add a line to ``checksums.jsonl``: at this step, the weights of all ranks were equal."""
        line = {"step": step, "checksum": f"{checksum:016x}", "ranks": ranks}
        with atomic.append(self.path / "checksums.jsonl") as file:
            file.write(json.dumps(line).encode() + b"\n")

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the result, and the report for people."""
        atomic.write(self.path / "summary.json", json.dumps({k: plain(v) for k, v in summary.items()}, indent=2) + "\n")
        self.report()

    @property
    def reported(self) -> bool:
        """Whether the report for people has been written."""
        return (self.path / "summary.md").exists()

    def report(self) -> None:
        """Write the report for people."""
        from ..report.page import write_page

        with self.writing():
            write_page(self.path)

    def draw(self) -> None:
        """Write ``report.html`` of the run so far; a report that cannot be made or written does not stop the run."""
        from ..report.html_run import write_report

        try:
            write_report(self.path)
        except OSError:
            return  # if the disk is full, writing the files that a run depends on raises the error
        except Exception as error:
            warnings.warn(f"no report.html of the run so far ({error!r})", ZeroBlockWarning, stacklevel=2)


def _rows(records: Iterable[Record], header: bool) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if header:
        writer.writerow(("step", "block", "loss", "lr", "coeff"))
    for r in records:
        coeff = f"{fmean(r.coeffs):.7g}" if r.coeffs else ""
        writer.writerow((r.step, r.block, f"{r.loss:.7g}", f"{r.lr:.7g}", coeff))
    return text.getvalue()
