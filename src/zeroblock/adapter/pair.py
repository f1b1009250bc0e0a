"""The two factors that LoRA adds to a matrix, in any model that PEFT adapted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

PARTS = ("lora_A", "lora_B", "scaling", "r", "get_base_layer")
"""Attributes of a PEFT layer that has both factors; layers of other adapters lack some."""


class Pair(NamedTuple):
    """ΔW = scaling·B·A, added to a matrix W; one factor starts at zero, so ΔW does, too.

    Args:
        still: the factor that starts at zero: B, or A for an embedding.
        drawn: the other factor.
        layer: the module whose weight is W.
        scaling: alpha/r, or whatever PEFT multiplies the product by.
        rank: the number of terms that each element of the product adds up.
    """

    still: Tensor
    drawn: Tensor
    layer: nn.Module
    scaling: float
    rank: int

    def size(self, matrix: float, drawn: float) -> float | None:
        """The root mean square of the factor ``still`` at which ΔW is as large as W.

            rms(ΔW) = scaling·√r·rms(still)·rms(drawn) = rms(W)

        Args:
            matrix: the root mean square of W.
            drawn: the root mean square of the other factor.

        Returns:
            None if there is no such size, because something is zero or not finite.
        """
        below = abs(self.scaling) * math.sqrt(self.rank) * drawn
        size = matrix / below if below else math.inf
        return size if 0 < size < math.inf else None


def pairs(model: nn.Module) -> Iterator[Pair]:
    """The pairs of all adapters of a model, in the order of its modules."""
    for module in model.modules():
        if not all(hasattr(module, part) for part in PARTS):
            continue
        found: Any = module
        embeds, layer = getattr(found, "lora_embedding_A", {}), found.get_base_layer()
        for name, scaling in found.scaling.items():
            rest = layer, float(scaling), int(found.r.get(name, 0))
            if name in embeds:
                yield Pair(embeds[name], found.lora_embedding_B[name], *rest)
            elif name in found.lora_A and name in found.lora_B:
                first, second = (getattr(factor[name], "weight", None) for factor in (found.lora_A, found.lora_B))
                if first is not None and second is not None:  # AdaLoRA's factors are three, and no modules
                    yield Pair(second, first, *rest)
