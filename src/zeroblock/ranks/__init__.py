"""Ranks: processes that take the steps of one run together, on ``torch.distributed``.

Noise is a function of its address, so ranks exchange losses and nothing else: one message per step.

``layout`` says which rank measures what, ``message`` is the message and the mean that is taken of it,
``channel`` sends it, ``checksum`` proves that weights are equal, and ``team`` is all of that for one optimizer.
"""

from .layout import Parallel, Ranks
from .team import Team

__all__ = ["Parallel", "Ranks", "Team"]
