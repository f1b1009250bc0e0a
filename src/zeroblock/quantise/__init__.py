"""Weights of 8 or 4 bits: integers on a grid, with one scale per group of them.

    w = s·(q - z)        q an integer in [-127, 127] or [-7, 7], s and z one number each per group of a row

Matrices that zeroblock stores have z = 0; other checkpoints may not.  A step may move the integers, rounded to the grid
at random so that its mean is kept, or the scales (QZO), or an adapter next to them.  The forward pass expands one
matrix at a time.
"""

from __future__ import annotations

from .layer import (
    BYTES,
    GROUP,
    KINDS,
    Codes,
    Given,
    Int4,
    Int8,
    QuantisedLinear,
    Scales,
    elements,
    quantised,
    quantised_layers,
    stored_as,
    stored_bytes,
)
from .store import check, expand_, quantise_, recorded, store_, values

__all__ = [
    "BYTES",
    "GROUP",
    "KINDS",
    "Codes",
    "Given",
    "Int4",
    "Int8",
    "QuantisedLinear",
    "Scales",
    "check",
    "elements",
    "expand_",
    "quantise_",
    "quantised",
    "quantised_layers",
    "recorded",
    "store_",
    "stored_as",
    "stored_bytes",
    "values",
]
