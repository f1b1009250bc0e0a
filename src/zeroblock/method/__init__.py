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
from .probes import adamezo, eggroll, fzoo, fzoo_bcd, mezo_greedy, mezo_svrg
from .shaped import conmezo, hizoo, subzero, zo_muon
from .table import CITATIONS, EPS, METHODS, Method, describe, get, method, own_lr, specimen

__all__ = [
    "CITATIONS",
    "EPS",
    "METHODS",
    "Method",
    "adalezo",
    "adamezo",
    "conmezo",
    "describe",
    "eggroll",
    "fzoo",
    "fzoo_bcd",
    "get",
    "hizoo",
    "lezo",
    "lozo",
    "lozo_m",
    "method",
    "mezo",
    "mezo_adam",
    "mezo_bcd",
    "mezo_bcd_adam",
    "mezo_bcd_adaptive",
    "mezo_greedy",
    "mezo_svrg",
    "own_lr",
    "sparse_mezo",
    "specimen",
    "subzero",
    "zo_momentum",
    "zo_muon",
    "zo_sign",
]
