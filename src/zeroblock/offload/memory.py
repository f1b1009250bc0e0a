"""The division of a given memory: the layers that stay, the layers that are streamed, and the length of rows.

    memory = outside the layers + perturbed copies + activations of a row + buffers of one layer each

Copies are of one layer on one side of the weights at a time.  Long rows have priority, because every row streams
the layers once more.  The rest, after the buffers that streaming needs, becomes more buffers, whose layers stay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..amount import words
from ..errors import ZeroBlockError
from ..quantise import elements
from .layout import CONVERTED
from .shelf import layers_of
from .streamed import MIN_BUFFERS

MIN_ROW_TOKENS = 256
"""Rows are not made shorter than this; a single example may be longer."""
MAX_ROW_TOKENS = 4096
"""Rows are not made longer than this unless the caller asks: the default length on a GPU."""
SPARE = 0.04
"""The share of the memory that is left to libraries and to fragmentation."""
POINTS = 2
"""Rows in a pass: both sides of a direction."""


@dataclass(frozen=True)
class Division:
    """The use of a memory, in bytes.

    Args:
        memory: bytes of the whole memory.
        layers: the number of layers of the model.
        layer: bytes of the largest layer.
        outside: bytes outside the layers, which stay.
        copies: bytes of perturbed copies.
        kept: bytes that the rule keeps from step to step.
        row: bytes that the activations of the longest row take.
        tokens: tokens of the longest row.
        buffers: the number of layers on the device at a time.
    """

    memory: int
    layers: int
    layer: int
    outside: int
    copies: int
    kept: int
    row: int
    tokens: int
    buffers: int

    @property
    def stay(self) -> int:
        """The number of layers that stay from pass to pass."""
        return self.layers if self.buffers >= self.layers else max(0, self.buffers - MIN_BUFFERS - 1)

    @property
    def used(self) -> int:
        """Bytes of all parts together."""
        return self.outside + self.copies + self.kept + self.row + self.buffers * self.layer

    @property
    def pass_tokens(self) -> int | None:
        """The most tokens in the rows of one pass, all points together; None if no memory was given."""
        spare = int(self.memory * (1 - SPARE)) - self.used
        return None if spare < 0 or not self.row else POINTS * self.tokens * (self.row + spare) // self.row

    def parts(self) -> str:
        """Everything but the layers, in words."""
        state = f"{words(self.kept)} of the rule's state, " if self.kept else ""
        return (
            f"{words(self.outside)} outside the layers, {words(self.copies)} of perturbed copies, "
            f"{state}rows of at most {self.tokens:,} tokens ({words(self.row)})"
        )

    def describe(self) -> str:
        """One line for the user."""
        streamed = self.layers - self.stay
        how = f"{self.stay} of {self.layers} layers stay, {streamed} are streamed" if streamed else "all layers stay"
        return f"{words(self.memory)}: {how} ({self.buffers} buffers of {words(self.layer)}), {self.parts()}"


def divide(
    model: nn.Module,
    memory: int,
    *,
    dtype: torch.dtype | None = None,
    lifted: int = 1,
    kept: int = 0,
    tokens: int | None = None,
) -> Division:
    """Divide a memory for a model.

    Args:
        model: the model, possibly on the meta device.
        memory: bytes.
        dtype: the dtype of the weights in the run, if the model has another one.
        lifted: layers that stay for a step because it moves them.
        kept: bytes that the rule keeps from step to step.
        tokens: tokens of the longest row that is wanted; 4,096 by default.

    Raises:
        ZeroBlockError: if the memory is too small; the message names the least that is enough.
    """
    longest = tokens or MAX_ROW_TOKENS
    shortest = min(longest, MIN_ROW_TOKENS)
    least = least_division(model, shortest, dtype=dtype, lifted=lifted, kept=kept)
    spare = int(memory * (1 - SPARE)) - least.used + least.row
    size = _itemsize(model, dtype)
    lengths = (*range(longest, shortest, -MIN_ROW_TOKENS), shortest)
    tokens = next((n for n in lengths if _row(model, n, size) <= spare), 0)
    if not tokens:
        needed = least.used / (1 - SPARE) / 1e9
        raise ZeroBlockError(
            f"{words(memory)} is too little for {least.parts()} and {least.buffers} layers of "
            f"{words(least.layer)}: give --memory {needed + 0.1:.1f}GB, or store the layers' matrices as "
            "integers (--weights int4)"
        )
    row = _row(model, tokens, size)
    buffers = min(least.layers, least.buffers + (spare - row) // max(1, least.layer))
    return replace(least, memory=memory, row=row, tokens=tokens, buffers=buffers)


def least_division(
    model: nn.Module, tokens: int, *, dtype: torch.dtype | None = None, lifted: int = 1, kept: int = 0
) -> Division:
    """The memory that streaming takes when no layer stays; see :func:`divide`.

    Args:
        tokens: tokens of the longest row.
    """
    layers, others = layers_of(model, dtype)
    if not layers:
        raise ZeroBlockError(f"{type(model).__name__} has no list of layers that could be streamed: leave out offload")
    layer, size = max(one.layout.nbytes for one in layers), _itemsize(model, dtype)
    expanded = max(sum(map(elements, one.tensors)) for one in layers) * size  # integers are expanded to numbers
    copies = max([expanded, *(slot.nbytes for slot in others.layout.slots)])
    buffers = min(MIN_BUFFERS + lifted, len(layers))
    row = _row(model, tokens, size)
    found = Division(0, len(layers), layer, others.layout.nbytes, copies, kept, row, tokens, buffers)
    return replace(found, memory=found.used)


def _itemsize(model: nn.Module, dtype: torch.dtype | None) -> int:
    """Bytes per number of the activations."""
    kinds = {param.dtype for param in model.parameters()} & set(CONVERTED)
    return max(kind.itemsize for kind in ([dtype] if dtype is not None else kinds or {torch.float32}))


def _row(model: nn.Module, tokens: int, size: int) -> int:
    """Bytes of a layer's activations for a row at both points, or of the logits of an eighth of its tokens if more."""
    config: Any = getattr(model, "config", None)
    if config is None:
        return 0
    config = config.get_text_config()
    width: int = config.hidden_size
    inner: int = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * width
    logits = tokens // 8 * getattr(config, "vocab_size", 0) * (size + 4)
    return int(POINTS * max(tokens * (4 * width + 2 * inner) * size, logits))
