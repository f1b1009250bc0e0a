"""Noise arithmetic on weights, one package per operation.

Each operation has a plain ``reference`` (numpy or torch), which is its specification in
code, and faster versions of it: ``cpu`` is a compiled loop, ``triton`` the GPU kernel.
All versions agree to the bit, or to a tolerance if they are part of a forward pass.  ``shared`` holds the
parts that several operations use.

The functions here take tensors of any shape and layout, pick the version that serves the
tensor's device and hand it flat pieces.
"""

from __future__ import annotations

from .adam import adam_
from .noise import add_noise_, fill_, normal, perturb, perturb_pair, uniform
from .outer import add_, add_outer_
from .shared.dispatch import DTYPES, Alpha

__all__ = [
    "DTYPES",
    "Alpha",
    "adam_",
    "add_",
    "add_noise_",
    "add_outer_",
    "fill_",
    "normal",
    "perturb",
    "perturb_pair",
    "uniform",
]
