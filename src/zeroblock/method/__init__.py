"""Methods: each is a name, a citation and one expression over the five parts."""

from .layers import adalezo, lezo
from .paper import (
    lozo,
    lozo_m,
    mezo,
    mezo_adam,
    mezo_bcd,
    mezo_bcd_adam,
    mezo_bcd_adaptive,
    sparse_mezo,
    zo_momentum,
    zo_sign,
)
from .table import CITATIONS, EPS, METHODS, Method, describe, get, method, specimen

__all__ = [
    "CITATIONS",
    "EPS",
    "METHODS",
    "Method",
    "adalezo",
    "describe",
    "get",
    "lezo",
    "lozo",
    "lozo_m",
    "method",
    "mezo",
    "mezo_adam",
    "mezo_bcd",
    "mezo_bcd_adam",
    "mezo_bcd_adaptive",
    "sparse_mezo",
    "specimen",
    "zo_momentum",
    "zo_sign",
]
