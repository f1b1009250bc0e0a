"""The records of a run in another library's training loop, for its logs and for the journals in its checkpoints."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

from .. import atomic
from ..errors import ZeroBlockError, ZeroBlockWarning
from ..journal import Contents, Header, Record, read
from ..journal.format import dump, locate
from ..optimizer import ZeroOrder


class Ledger:
    """Keeps every record of a run.

    Args:
        optimizer: the optimizer of the run; a listener that it already has is still called.
        base: whether the weights are the base weights, so that a journal can start from them.
        model: name of the base model, for the journal.
    """

    def __init__(self, optimizer: ZeroOrder, *, base: bool, model: str = "") -> None:
        self.optimizer = optimizer
        self.records: list[Record] = []
        self.header: Header | None = None
        self._logged = 0
        """The number of records that were logged."""
        self._began = 0
        """The number of records from before this call of ``train``."""
        self._listener, optimizer.listener = optimizer.listener, self._hear
        if base and not optimizer.steps:
            try:
                self.header = Header.of(optimizer, model=model)
            except ZeroBlockError as error:
                warnings.warn(f"checkpoints are written without a journal: {error}", ZeroBlockWarning, stacklevel=2)

    def _hear(self, record: Record) -> None:
        self.records.append(record)
        if self._listener is not None:
            self._listener(record)

    def begin(self) -> None:
        """Note that a call of ``train`` begins."""
        self._logged = self._began = len(self.records)

    def loss(self) -> float:
        """Mean loss of the steps of this call of ``train``."""
        return _mean([record.loss for record in self.records[self._began :]])

    def amend(self, logs: dict[str, float], finite: bool) -> None:
        """Put the numbers of the steps into the Trainer's logs.

        Args:
            logs: the Trainer's logs, changed in place.
            finite: leave out of the mean losses that are not finite.
        """
        self.optimizer.flush()
        fresh = self.records[self._logged :]
        if "loss" in logs and fresh:
            self._logged = len(self.records)
            losses = [record.loss for record in fresh]
            logs["loss"] = _mean([loss for loss in losses if math.isfinite(loss)] if finite else losses)
            logs["coefficient"] = _mean([abs(coeff) for record in fresh for coeff in record.coeffs])
            logs["block"] = fresh[-1].block
            if self.optimizer.skipped:
                logs["skipped_steps"] = self.optimizer.skipped
        if "train_loss" in logs:
            logs["train_loss"] = self.loss()

    def save(self, folder: Path) -> None:
        """Write the journal of all steps into a checkpoint."""
        self.optimizer.flush()
        if self.header is not None and len(self.records) == self.optimizer.steps:
            atomic.write(locate(folder), dump(self.header, self.records))

    def load(self, folder: Path) -> Contents | None:
        """Take over the journal of a checkpoint, if it has one."""
        if not locate(folder).exists():
            self.records, self.header = [], None
            self.begin()
            return None
        contents = read(folder)
        self.records, self.header = list(contents.records), contents.header
        self.begin()
        return contents


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
