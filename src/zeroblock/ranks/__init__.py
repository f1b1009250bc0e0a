"""Ranks: processes that take the steps of one run together, on ``torch.distributed``.

Noise is a function of its address, so ranks exchange losses and nothing else: one message per step.

``layout`` says which rank measures what, ``message`` defines the message and the mean over all ranks,
``channel`` sends it, ``checksum`` proves that weights are equal, and ``team`` combines all of that for one optimizer.
"""

from .layout import Parallel, Ranks
from .team import Team

__all__ = ["Parallel", "Ranks", "Team"]
