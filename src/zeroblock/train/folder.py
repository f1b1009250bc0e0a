"""The run folder: what a run leaves behind, written as it goes.

config.toml     the configuration, its first line the command that runs it
journal.zbj     the journal, of zeroth-order methods
metrics.jsonl   one evaluation a line
steps.csv       one step a line
summary.json    the result, once the run has finished; summary.md and figures/ for people
snapshot/       weights and optimizer state of some step, where asked for
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from ..errors import ZeroBlockError
from ..evaluate.measurement import Measurement, plain
from ..journal import Record
from .config import Config


class Folder:
    """A run folder.

    Args:
        path: where it is.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.measurements: list[Measurement] = []

    @property
    def journal(self) -> Path:
        """Where the journal is."""
        return self.path / "journal.zbj"

    @property
    def snapshot(self) -> Path:
        """Where the snapshot is."""
        return self.path / "snapshot"

    @property
    def config(self) -> Config:
        """The configuration of the run."""
        file = self.path / "config.toml"
        if not file.is_file():
            raise ZeroBlockError(
                f"{self.path} holds no run (no config.toml): zeroblock train --out {self.path} makes one"
            )
        return Config.load(file)

    def summary(self) -> dict[str, Any] | None:
        """The result, or None where the run has not finished."""
        try:
            found: dict[str, Any] = json.loads((self.path / "summary.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ZeroBlockError(
                f"{self.path / 'summary.json'} is damaged ({error}): remove it, then zeroblock resume {self.path}"
            ) from error
        return found

    @property
    def begun(self) -> bool:
        """Whether there is a run."""
        return (self.path / "config.toml").exists() or self.journal.exists()

    def refuse(self) -> None:
        """Refuse a folder that holds a run already."""
        if self.begun:
            raise ZeroBlockError(
                f"{self.path} holds a run already: zeroblock resume {self.path}, or give another --out"
            )

    def create(self, config: Config, again: bool = False) -> None:
        """Begin: the folder with its configuration.

        Args:
            config: resolved.
            again: what there is of a run that cannot be continued is dropped.
        """
        if not again:
            self.refuse()
            if config.snapshot_every and self.snapshot.exists():
                raise ZeroBlockError(f"{self.snapshot} is there already, and not this run's: give another --out")
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "metrics.jsonl").unlink(missing_ok=True)
            first = f"# zeroblock train --config {self.path / 'config.toml'} --out DIR"
            self._write("config.toml", f"{first}\n{config.dump()}")

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A full disk or a folder that cannot be written is said in one line."""
        try:
            yield
        except BrokenPipeError:  # of what is being shown, not of a file
            raise
        except OSError as error:
            advice = f"then zeroblock resume {self.path}" if self.journal.exists() else "or give another --out"
            raise ZeroBlockError(
                f"cannot write to {self.path} ({error.strerror or error}): see to the disk, {advice}"
            ) from error

    def reopen(self, steps: int) -> None:
        """Read the measurements of the steps that are known to have been taken; later ones, and a torn line, go."""
        file = self.path / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
        kept = []
        for line in lines:
            try:
                found = Measurement.of(json.loads(line))
            except (ValueError, KeyError, TypeError):
                break
            if not line.endswith("\n"):  # what is added next would join it
                break
            if found.step <= steps:
                kept.append(line)
                self.measurements.append(found)
        if kept != lines:
            self._write("metrics.jsonl", "".join(kept))

    def measured(self, measurement: Measurement) -> None:
        """Add an evaluation."""
        self.measurements.append(measurement)
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(measurement.line()) + "\n")

    def at(self, step: int) -> set[str]:
        """The splits that have been measured after a step."""
        return {one.split for one in self.measurements if one.step == step}

    def steps(self, records: Iterable[Record]) -> None:
        """Write ``steps.csv``; the coefficient is the mean over the probes."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("step", "block", "loss", "lr", "coeff"))
        for r in records:
            writer.writerow(
                (r.step, r.block, f"{r.loss:.7g}", f"{r.lr:.7g}", f"{fmean(r.coeffs):.7g}" if r.coeffs else "")
            )
        self._write("steps.csv", text.getvalue())

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the result, and what people read."""
        self._write("summary.json", json.dumps({k: plain(v) for k, v in summary.items()}, indent=2) + "\n")
        self.report()

    @property
    def reported(self) -> bool:
        """Whether there is something for people to read."""
        return (self.path / "summary.md").exists()

    def report(self) -> None:
        """Write what people read of the result."""
        from ..report.page import summary

        with self.writing():
            summary(self.path)

    def _write(self, name: str, text: str) -> None:
        """In one stroke: a kill leaves the old file or the new one."""
        half = self.path / f"{name}.part"
        half.write_text(text, encoding="utf-8")
        os.replace(half, self.path / name)
