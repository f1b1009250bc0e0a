"""Bases: the linear map P of one tensor, which lifts coordinates z into the tensor's space."""

from .base import CHUNK, Alphas, Basis, Site
from .elementwise import Elementwise
from .factored import Factored
from .grid import Grid

__all__ = ["CHUNK", "Alphas", "Basis", "Elementwise", "Factored", "Grid", "Site"]
