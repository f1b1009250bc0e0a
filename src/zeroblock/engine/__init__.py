"""The engine: a decoder's losses, packed into rows and forked at the active block.

>>> engine = Engine(model)                                        # doctest: +SKIP
>>> objective = engine.objective(encoded, labels)                 # doctest: +SKIP
>>> optimizer.step(objective)                                     # doctest: +SKIP
"""

from .engine import Engine, Score
from .objective import BatchObjective

__all__ = ["BatchObjective", "Engine", "Score"]
