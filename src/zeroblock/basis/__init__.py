"""Bases: the linear map P of one tensor, which lifts coordinates z into the tensor's space."""

from .base import CHUNK, Alphas, Basis, Initial, Site
from .elementwise import Elementwise
from .elsewhere import Elsewhere
from .factored import Factored
from .framed import Framed
from .grid import Grid
from .outer import OuterProduct
from .scaled import Scaled, times
from .shaped import Shaped

__all__ = [
    "CHUNK", "Alphas", "Basis", "Elementwise", "Elsewhere", "Factored", "Framed", "Grid", "Initial", "OuterProduct",
    "Scaled", "Shaped", "Site", "times",
]  # fmt: skip
