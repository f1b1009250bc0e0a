"""Root-mean-square normalisation, y = w·x/√(mean x² + eps): one kernel instead of six.

Families multiply by the weights at different places, which 16-bit results show: see :class:`Scaling`.
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
