"""The engine: it packs examples into rows, and computes the losses at all points of a step in one forked pass.

>>> engine = Engine(model)                                        # doctest: +SKIP
>>> objective = engine.objective(encoded, labels)                 # doctest: +SKIP
>>> optimizer.step(objective)                                     # doctest: +SKIP
"""

from typing import Any

from ..errors import warn_renamed
from .engine import Engine, Score
from .objective import BatchObjective

__all__ = ["BatchObjective", "Engine", "Score"]


def __getattr__(name: str) -> Any:
    """Accept the name that ``BatchObjective`` had until 0.1."""
    if name != "Objective":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_renamed("zeroblock.engine.Objective", "zeroblock.engine.BatchObjective")
    return BatchObjective
