"""Rules: from an estimate c·z in coordinates to a step δ in coordinates."""

from .adam import Adam
from .base import RULES, Move, Rule
from .momentum import Momentum
from .normalized import Normalized
from .sgd import SGD, Sign

__all__ = ["RULES", "SGD", "Adam", "Momentum", "Move", "Normalized", "Rule", "Sign"]
