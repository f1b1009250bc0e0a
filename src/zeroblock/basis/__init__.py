"""Bases: the linear map P of one tensor, which lifts coordinates z into the tensor's space."""

from .base import CHUNK, Alphas, Basis, Site
from .elementwise import Elementwise
from .elsewhere import Elsewhere
from .factored import Factored
from .outer import OuterProduct

__all__ = ["CHUNK", "Alphas", "Basis", "Elementwise", "Elsewhere", "Factored", "OuterProduct", "Site"]
