"""How a given amount of memory is divided: what stays, what is streamed, and how long rows may be.

    memory = outside the layers + perturbed copies + activations of a row + buffers of one layer each

Copies are of one layer on one side of the weights at a time.  Long rows come first, for every row streams the
layers once more.  What is left after the buffers that streaming needs goes to more of them, whose layers stay.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import ZeroBlockError
from .shelf import layers_of
from .streamed import MIN_BUFFERS

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
MIN_ROW_TOKENS = 256
"""Rows are not made shorter than this; a single example may be longer."""
MAX_ROW_TOKENS = 4096
"""Rows are not made longer than this: the length that a GPU gets by default."""
SPARE = 0.04
"""Share of the memory that libraries and fragments of memory may take."""
POINTS = 2
"""Rows in a pass: both sides of a direction."""


def nbytes(text: str) -> int:
    """Bytes of an amount of memory.

    >>> nbytes("8GB"), nbytes("1.5 GiB")
    (8000000000, 1610612736)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)?\s*", text, re.IGNORECASE)
    if match is None or not (match[2] or "").strip():
        raise ZeroBlockError(f"an amount of memory is a number with a unit, such as 8GB or 500MB, got {text!r}")
    found = int(float(match[1]) * UNITS[match[2].upper()])
    if not found:
        raise ZeroBlockError(f"an amount of memory must be positive, got {text!r}")
    return found


@dataclass(frozen=True)
class Division:
    """What a memory is used for, in bytes.

    Args:
        memory: all of it.
        layers: how many the model has.
        layer: bytes of the largest one.
        outside: bytes outside the layers, which stay.
        copies: bytes of perturbed copies.
        kept: bytes that the rule keeps from step to step.
        row: bytes that the activations of the longest row take.
        tokens: of the longest row.
        buffers: layers on the device at a time.
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
        """How many layers stay from pass to pass."""
        return self.layers if self.buffers >= self.layers else max(0, self.buffers - MIN_BUFFERS - 1)

    @property
    def used(self) -> int:
        """Bytes of everything."""
        return self.outside + self.copies + self.kept + self.row + self.buffers * self.layer

    def describe(self) -> str:
        """One line for the user."""
        streamed = self.layers - self.stay
        how = f"{self.stay} of {self.layers} layers stay, {streamed} are streamed" if streamed else "all layers stay"
        state = f"{self.kept / 1e9:.2f} GB of the rule's state, " if self.kept else ""
        return (
            f"{self.memory / 1e9:.1f} GB: {how} ({self.buffers} buffers of {self.layer / 1e9:.2f} GB), "
            f"{self.outside / 1e9:.2f} GB outside the layers, {self.copies / 1e9:.2f} GB of perturbed copies, "
            f"{state}rows of at most {self.tokens:,} tokens ({self.row / 1e9:.2f} GB)"
        )


def divide(model: nn.Module, memory: int, *, itemsize: int | None = None, lifted: int = 1, kept: int = 0) -> Division:
    """Divide a memory for a model.

    Args:
        model: may be on the meta device.
        memory: bytes.
        itemsize: bytes per weight, where the model's own dtype is not that of the run.
        lifted: layers that stay for a step because it moves them.
        kept: bytes that the rule keeps from step to step.

    Raises:
        ZeroBlockError: if it is too small, with the least that is enough.
    """
    layers, others = layers_of(model)
    if not layers:
        raise ZeroBlockError(f"{type(model).__name__} has no list of layers that could be streamed: leave out offload")
    factor = 1.0 if itemsize is None else itemsize / max(t.element_size() for layer in layers for t in layer.tensors)
    layer = int(max(one.layout.nbytes for one in layers) * factor)
    outside = int(sum(tensor.nbytes for tensor in others) * factor)
    copies = max(layer, int(max((tensor.nbytes for tensor in others), default=0) * factor))
    size = itemsize or max(t.element_size() for one in layers for t in one.tensors)
    least = min(MIN_BUFFERS + lifted, len(layers))
    fixed = outside + copies + kept
    room = int(memory * (1 - SPARE)) - fixed - least * layer
    tokens = next((n for n in range(MAX_ROW_TOKENS, 0, -MIN_ROW_TOKENS) if _row(model, n, size) <= room), 0)
    if not tokens:
        row = _row(model, MIN_ROW_TOKENS, size)
        needed = (fixed + row + least * layer) / (1 - SPARE) / 1e9
        state = f"{kept / 1e9:.2f} GB of the rule's state, " if kept else ""
        raise ZeroBlockError(
            f"{memory / 1e9:.1f} GB are too few: {outside / 1e9:.2f} GB outside the layers, {copies / 1e9:.2f} GB of "
            f"perturbed copies, {state}{row / 1e9:.2f} GB for rows of {MIN_ROW_TOKENS} tokens and {least} layers of "
            f"{layer / 1e9:.2f} GB take {needed:.1f} GB: give --memory {needed + 0.1:.1f}GB, or store the layers' "
            "matrices as integers (--weights int4)"
        )
    row = _row(model, tokens, size)
    buffers = least + (room - row) // layer if layer else least
    return Division(memory, len(layers), layer, outside, copies, kept, row, tokens, min(len(layers), buffers))


def _row(model: nn.Module, tokens: int, size: int) -> int:
    """Bytes that a layer computes from a row of so many tokens at both points, and the logits of an eighth of them."""
    config: Any = getattr(model, "config", None)
    if config is None:
        return 0
    config = config.get_text_config()
    width: int = config.hidden_size
    inner: int = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * width
    logits = tokens // 8 * getattr(config, "vocab_size", 0) * (size + 4)
    return int(POINTS * max(tokens * (4 * width + 2 * inner) * size, logits))
