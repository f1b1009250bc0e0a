"""Weights that become infinite or NaN in a replay are an error, which names the step responsible."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import torch

from ..errors import ZeroBlockError, ZeroBlockWarning
from ..fused import Progress
from ..optimizer import ZeroOrder
from ..record import Record
from ..rerun import not_finite, retake


def advance(
    optimizer: ZeroOrder, records: Sequence[Record], restart: Callable[[], ZeroOrder], progress: Progress | None = None
) -> None:
    """Take all steps and settle; refuse weights that are not finite afterwards.

    Args:
        optimizer: the optimizer, at step 0 on the base weights.
        records: the records, starting with step 0.
        restart: puts the base weights back and returns an optimizer at step 0; only called to look for the step.
        progress: called now and then with the fraction done.
    """
    before = not_finite(optimizer)  # the journal did not cause these
    retake(optimizer, records, progress)
    optimizer.settle()
    broken = not_finite(optimizer) - before
    if broken:
        step = _first_bad_step(records, restart, broken)
        raise ZeroBlockError(
            f"step {step} makes weights of {min(broken)!r} infinite or NaN, from which no run would have continued: "
            f"the journal was made up, or its base is a different one; zeroblock replay --step {step} takes the steps "
            "before it"
        )


def _first_bad_step(records: Sequence[Record], restart: Callable[[], ZeroOrder], names: set[str]) -> int:
    """Find the step by two more replays: one in stretches, and one that takes the broken stretch step by step."""
    first, stretch = 0, max(1, math.isqrt(len(records)))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", ZeroBlockWarning)  # the first replay gave them
        while stretch:
            optimizer = restart()
            retake(optimizer, records[:first])
            while first < len(records):
                retake(optimizer, records[first : first + stretch])
                if not_finite(optimizer) & names:
                    break
                first += stretch
            stretch = 0 if stretch == 1 else 1
    return min(first, len(records) - 1)
