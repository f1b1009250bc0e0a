"""Attention over a packed row of tokens.

A query q sees the keys k ≤ until[q] with k < root, start[q] ≤ k < trunk[q] or k ≥ branch[q]; with a window
also |positions[q] - positions[k]| < window.  Five numbers per query say this, so no mask has to exist.

``reference`` is plain torch under a mask, and also serves the CPU: torch's fused attention is a
compiled loop already, so there is no separate CPU version.  ``triton`` never touches tiles of keys
that no query of a tile sees.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Packed(Protocol):
    """The fields that say which of S tokens see which; each is int64, and (S,) but for the root."""

    @property
    def root(self) -> Tensor:
        """(1,) number of tokens at the beginning that all examples see."""
        ...

    @property
    def start(self) -> Tensor:
        """First token of the query's example after the root."""
        ...

    @property
    def trunk(self) -> Tensor:
        """End of the keys that the query sees from ``start`` on, before its branch."""
        ...

    @property
    def branch(self) -> Tensor:
        """First token of the query's own branch."""
        ...

    @property
    def until(self) -> Tensor:
        """Last token that the query sees: itself in a decoder, the last of its example in an encoder."""
        ...

    @property
    def positions(self) -> Tensor:
        """Places of the tokens in their own strings."""
        ...
