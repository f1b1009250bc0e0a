"""A hand that makes runs in this process, which has its imports: a quarter of the time of a worker's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zeroblock.errors import ZeroBlockError
from zeroblock.report.view import Quiet
from zeroblock.sweep.clock import CLOCK, Clock
from zeroblock.sweep.plan import Run
from zeroblock.train.loop import make


class Here:
    alive = True

    def make(self, run: Run, folder: Path, log: Path) -> str:
        try:
            return make(run.config, folder, Clock(Quiet(), folder / CLOCK)).reason
        except ZeroBlockError as error:
            return str(error)

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


@contextlib.contextmanager
def hiring(*words: Any) -> Iterator[tuple[int, type[Here]]]:
    """In place of that of the command line."""
    yield 1, Here
