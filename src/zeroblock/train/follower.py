"""The run folder and the journal of the ranks that do not write: in memory, never on a disk."""

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
        """Append the next step's record."""
        ...

    def sync(self) -> None:
        """Wait until all records are on the disk."""
        ...


class Unwritten:
    """The journal of a rank that does not write it."""

    def append(self, record: Record) -> None:
        pass

    def sync(self) -> None:
        pass


class Follower(Folder):
    """The folder of a rank that does not write: it holds the measurements in memory, and has no files.

    Args:
        path: the folder's path, for messages.
    """

    def hear(self, measurements: Iterable[Measurement]) -> None:
        """Add the measurements that the leader has read."""
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
