"""The numbers of submitted steps on their way to the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..interrupt import uninterrupted
from ..number import Numbers
from ..plan import Plan
from ..record import Record

MAX_STEPS = 64
"""Submitted steps that may be in flight before the host waits for the oldest."""
MAX_LAG_MS = 1000.0
"""Milliseconds of work that may be in flight, so that stops are short; two steps are always allowed."""


class _Pending(NamedTuple):
    plan: Plan
    numbers: Numbers
    event: torch.cuda.Event


class Queue:
    """Steps that were submitted and whose numbers the host has not seen.

    Args:
        tell: called with every step's record, in order.
    """

    def __init__(self, tell: Callable[[Record], None]) -> None:
        self.tell = tell
        self._pending: deque[_Pending] = deque()
        self._last_end: torch.cuda.Event | None = None
        self._step_ms = MAX_LAG_MS
        """Milliseconds from the end of one submitted step to the end of the next, as last measured."""

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def limit(self) -> int:
        """Maximum number of steps in flight."""
        return max(2, min(MAX_STEPS, int(MAX_LAG_MS / self._step_ms)))

    def put(self, plan: Plan, numbers: Numbers) -> None:
        """Send a submitted step's numbers to the host, without waiting for them."""
        flat = torch.empty(numbers.flat.shape, dtype=numbers.flat.dtype, pin_memory=True)
        flat.copy_(numbers.flat, non_blocking=True)
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(numbers.flat.device))
        self._pending.append(_Pending(plan, numbers.like(flat), event))

    def deliver(self, most: int = 0, until: Callable[[], bool] = lambda: False) -> None:
        """Report the steps that have finished, in order; wait until at most ``most`` are in flight.

        Args:
            most: number of steps that may remain in flight.
            until: returns True if the host must wait for the rest, whatever their number.
        """
        while self._pending:
            first = self._pending[0]
            if not (len(self._pending) > most or first.event.query() or until()):
                break
            first.event.synchronize()  # Ctrl-C may come here: the step is still in the queue
            with uninterrupted():
                self._pending.popleft()
                if self._last_end is not None:
                    self._step_ms = max(1e-3, self._last_end.elapsed_time(first.event))
                self._last_end = first.event
                record = first.plan.record(first.numbers)
                if record.finite:
                    first.plan.state.count(first.plan.turn.number)
                self.tell(record)
