"""The pieces of a forward pass that is captured layer by layer: what the engine offers, and what a runner asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from .direction import Point


class Call(NamedTuple):
    """The arguments of a layer, with None in place of its hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Tape(Protocol):
    """Follows a forward pass that skips its layers, which are captured one by one; takes what comes before and after.

    Piece 0 comes before the first layer, piece i + 1 is layer i, the last one comes after the layers.
    """

    def enter(self, layer: int, hidden: Tensor, call: Call) -> None:
        """A layer is called."""
        ...

    def leave(self) -> tuple[Tensor, bool]:
        """The hidden states after the layers, and whether they are the rows of several points."""
        ...


class Staging(Protocol):
    """An objective bound to a batch that lies in a buffer on the device."""

    def losses(self, points: Sequence[Point], tape: Tape | None = None) -> Tensor:
        """(points,) the losses; ``tape`` follows the forward pass."""
        ...

    def layers(self) -> contextlib.AbstractContextManager[None]:
        """A context in which ``layer`` may be called."""
        ...

    def layer(self, i: int, hidden: Tensor, call: Call, points: Sequence[Point], parted: bool) -> Tensor:
        """Run one layer.

        Args:
            i: which.
            hidden: (rows, S, width).
            call: its other arguments.
            points: where it is evaluated, if it is active.
            parted: whether there is a row per point already.

        Returns:
            (rows or points, S, width).
        """
        ...
