"""How far steps move a block, relative to the size of its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


class Moves:
    """The relative sizes of successive steps: rms of the step / rms of the weights.

    Without a learning rate, steps are in units of the weights, so the records are enough; for plain
    descent the sizes of the blocks must be known.

    >>> moves = Moves({"subspace": "Relative(subspace=Full())", "rule": "Sign()"}, blocks=2, most=1)
    >>> moves.next(0, 0.004, (-17.0,))
    0.004

    Args:
        parts: the composition in words, ``optimizer.parts``.
        blocks: the number of blocks.
        most: the maximum number of blocks that one step moves; if it is not 1, sizes are unknown, because a record
            names one block.
        sizes: root mean square of the weights of every block, where it is known.
        clip: the bound to which coefficients are clamped.
    """

    def __init__(
        self,
        parts: Mapping[str, str],
        blocks: int,
        most: int,
        sizes: Sequence[float | None] = (),
        clip: float | None = None,
    ) -> None:
        rule, subspace = parts.get("rule", ""), parts.get("subspace", "")
        relative = subspace.startswith("Relative(") and most == 1
        self.normalized = relative and rule == "Normalized(rule=SGD())"
        self.sign = relative and rule == "Sign()"
        self.plain = most == 1 and rule == "SGD()" and subspace == "Full()"
        self.sizes = sizes if self.plain else ()
        self.clip = math.inf if clip is None else clip
        self._table = [[0.0, 0.0] for _ in range(blocks + 1)]

    @property
    def known(self) -> bool:
        """Whether the sizes of steps can be computed."""
        return self.normalized or self.sign or any(self.sizes)

    def next(self, block: int, lr: float, coeffs: Sequence[float]) -> float | None:
        """Return the relative size of the next step: None if it is unknown, 0 if the step moved nothing."""
        if not self.known:
            return None
        if not coeffs or not all(map(math.isfinite, coeffs)):
            return 0.0
        if self.sign:
            return lr
        size: float | None = 1.0
        coeffs = [max(-self.clip, min(self.clip, c)) for c in coeffs]
        if self.normalized:
            from ..rule import Normalized

            coeffs = Normalized().weigh(coeffs, self._table, block)
        else:
            size = self.sizes[block]
        return lr * math.sqrt(math.fsum(c * c for c in coeffs)) / len(coeffs) / size if size else None
