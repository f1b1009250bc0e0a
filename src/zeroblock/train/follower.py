"""The run folder and the journal as the ranks besides rank 0 have them: in memory, never on a disk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from ..evaluate.measurement import Measurement
from ..record import Record
from .config import Config
from .folder import Folder


class Log(Protocol):
    """Takes the records of a run."""

    def append(self, record: Record) -> None:
        """The next step's record."""
        ...

    def sync(self) -> None:
        """Wait until all records are safe."""
        ...


class Unwritten:
    """The journal of a rank that does not write it."""

    def append(self, record: Record) -> None:
        pass

    def sync(self) -> None:
        pass


class Follower(Folder):
    """The folder of a rank that does not write: it knows the measurements, and no file.

    Args:
        path: where rank 0 has it, for messages.
        measurements: of the run so far.
    """

    def hear(self, measurements: Iterable[Measurement]) -> None:
        """Take over the measurements of rank 0."""
        for measurement in measurements:
            self.add(measurement)

    def lock(self) -> None:
        pass

    def create(self, config: Config, again: bool = False) -> None:
        pass

    def reopen(self, records: Iterable[Record], steps: int) -> str:
        return ""

    def measured(self, measurement: Measurement) -> None:
        self.add(measurement)

    def add_steps(self, records: Iterable[Record]) -> None:
        pass

    def agreed(self, step: int, checksum: int, ranks: int) -> None:
        pass

    def finish(self, summary: dict[str, Any]) -> None:
        pass

    def report(self) -> None:
        pass

    def draw(self) -> None:
        pass
