"""Methods: each is a name, a citation and one expression over the five parts.

A method that enters ``METHODS`` joins the library: the generic tests run over the table.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from .. import budget
from ..errors import ZeroBlockError, unknown
from ..estimator import Estimator, TwoSided
from ..optimizer import ZeroOrder

EPS = 1e-3
"""Distance of the points from θ in every paper of the table."""

Method = Callable[..., ZeroOrder]
METHODS: dict[str, Method] = {}
CITATIONS: dict[str, str] = {}


def method(citation: str) -> Callable[[Method], Method]:
    """Enter a factory in the table of methods."""

    def enter(factory: Method) -> Method:
        METHODS[factory.__name__] = factory
        CITATIONS[factory.__name__] = citation
        return factory

    return enter


def distance(eps: float | None, lr: float | None) -> float:
    """The distance from θ at which to measure: eps, else the papers' value, or without lr a share of the weights."""
    if eps is not None:
        return eps
    return budget.EPS if lr is None else EPS


def measured(estimator: Estimator | None, eps: float | None, probes: int, lr: float | None = 0.0) -> Estimator:
    """The given estimator, which brings its own eps and probes, or else central differences.

    Without eps, these measure at :func:`distance`.
    """
    if estimator is None:
        return TwoSided(distance(eps, lr), probes)
    if eps not in (None, distance(None, lr)) or probes != 1:
        raise ZeroBlockError(f"eps and probes belong to the estimator: give them to {type(estimator).__name__} alone")
    return estimator


def get(name: str) -> Method:
    """The method with a name; the error for an unknown name suggests the nearest one."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]


def describe(factory: Method) -> dict[str, Any]:
    """Name, summary, parts, defaults and citation of a method, read from the factory itself."""
    defaults = {
        name: getattr(p.default, "__name__", p.default)
        for name, p in inspect.signature(factory).parameters.items()
        if p.default is not inspect.Parameter.empty and p.default is not None
    }
    return {
        "name": factory.__name__,
        "summary": (inspect.getdoc(factory) or "").partition("\n")[0].replace("``", ""),
        "parts": factory(specimen(), lr=0.0).parts,
        "defaults": defaults,
        "citation": CITATIONS[factory.__name__],
    }


@functools.cache
def own_lr(name: str) -> float | None:
    """The learning rate that a method brings along; None if its steps are sized in units of the weights."""
    built = METHODS[name](specimen()) if name in METHODS else None
    return None if built is None or built.subspace.relative else float(built.lr)


@functools.cache
def specimen() -> nn.Module:
    """A model small enough to try methods on."""
    return nn.ModuleDict({"embed": nn.Embedding(2, 2), "layers": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
