"""The engine: a decoder's losses, packed into rows and forked at the active block.

>>> engine = Engine(model)                                        # doctest: +SKIP
>>> objective = engine.objective(encoded, labels)                 # doctest: +SKIP
>>> optimizer.step(objective)                                     # doctest: +SKIP
"""

from .engine import Engine, Objective, Score

__all__ = ["Engine", "Objective", "Score"]
