"""Normalisation: by the root mean square, y = w·x/√(mean x² + eps), in one kernel instead of six; and by mean and
variance, y = w·(x - mean)/√(var + eps) + b, in half the time of torch's kernel for rows of a few thousand numbers.

Families with the first multiply by w before or after rounding, which shows in 16-bit results: see :class:`Scaling`.
"""

from __future__ import annotations

import enum


class Scaling(enum.Enum):
    """How the normalised values are multiplied by the weights."""

    ROUNDED = "rounded"
    """w · round(x̂), as Llama does."""
    WIDE = "wide"
    """round(w · x̂) with the product in fp32, as OLMo 2 does."""
    SHIFTED = "shifted"
    """round((1 + w) · x̂) with the product in fp32, as Gemma does."""
