"""A hand that makes runs in this process, which has its imports, and without figures: a quarter of the time."""

from __future__ import annotations

import contextlib
import sys
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
        there = sys.modules.get("matplotlib")
        sys.modules["matplotlib"] = None  # type: ignore[assignment]
        try:
            return make(run.config, folder, Clock(Quiet(), folder / CLOCK)).reason
        except ZeroBlockError as error:
            return str(error)
        finally:
            del sys.modules["matplotlib"]
            if there is not None:
                sys.modules["matplotlib"] = there

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass

    def kill(self) -> None:
        pass


@contextlib.contextmanager
def hiring(*words: Any) -> Iterator[tuple[int, type[Here]]]:
    """In place of that of the command line."""
    yield 1, Here
