"""Rules: from an estimate c·z in coordinates to a step δ in coordinates."""

from .adam import Adam
from .base import RULES, Move, Rule
from .cone import Cone
from .hessian import Hessian
from .momentum import Momentum
from .muon import Muon
from .normalized import Normalized
from .recall import AnchorSGD, Recall, RecallAdam
from .sgd import SGD, Sign

__all__ = [
    "RULES", "SGD", "Adam", "AnchorSGD", "Cone", "Hessian", "Momentum", "Move", "Muon", "Normalized", "Recall",
    "RecallAdam", "Rule", "Sign",
]  # fmt: skip
