"""Bases: the linear map P of one tensor, which lifts coordinates z into the tensor's space."""

from .base import CHUNK, Alphas, Basis, Initial, Site
from .elementwise import Elementwise
from .factored import Factored
from .scaled import Scaled, times

__all__ = ["CHUNK", "Alphas", "Basis", "Elementwise", "Factored", "Initial", "Scaled", "Site", "times"]
