"""Steps without a finite loss are skipped: count them, warn about the first, and give up after many in a row."""

from __future__ import annotations

import warnings

from .errors import DivergenceError, ZeroBlockWarning
from .record import Record

ADVICE = "lower lr (try a tenth), set clip, lower eps if the weights are small, or use bf16 or fp32, not fp16"


class Patience:
    """Counts steps whose loss was not finite.

    Args:
        limit: number of such steps in a row that ends the run.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.load(skipped=0, run=0)

    def load(self, skipped: int, run: int) -> None:
        """Continue the counts of a saved state."""
        self.skipped, self.run = skipped, run
        self.warned = skipped > 0
        self._worst: tuple[int, int] | None = None
        """Length and last step of the longest run of skipped steps that was not reported yet."""

    def see(self, record: Record) -> None:
        """Count a step."""
        if record.finite:
            self.run = 0
            return
        self.skipped += 1
        self.run += 1
        if self._worst is None or self.run > self._worst[0]:
            self._worst = (self.run, record.step)

    @property
    def exhausted(self) -> bool:
        """Whether the run must end."""
        return self._worst is not None and self._worst[0] >= self.limit

    def complain(self) -> None:
        """Raise after too many skipped steps in a row; warn about the very first."""
        if self._worst is None:
            return
        (run, step), exhausted, self._worst = self._worst, self.exhausted, None
        if exhausted:
            raise DivergenceError(
                f"the loss was not finite for {run} steps in a row, the last being step {step}: {ADVICE}"
            )
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"the loss of step {step} is not finite; the step is skipped and counted in optimizer.skipped. If this "
                f"continues: {ADVICE}",
                ZeroBlockWarning,
                stacklevel=4,
            )
