"""The held prefix of a pass: steps that stay on one block and one batch reuse the hidden states before the block.

Between two steps of a turn only the active block moves, so the layers before it compute the same bits again.  They are
skipped if the last pass was over the same row and the same block, and no other tensor of the model has a new version.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ..direction import Member
from ..interrupt import uninterrupted
from .anatomy import Anatomy
from .cut import Cuts, Forward, first, hidden_of, put
from .fork import restore
from .pack import Row


@dataclasses.dataclass(frozen=True)
class _Place:
    """A pass: its row, its active tensors, and the versions of all others."""

    row: Row
    members: tuple[int, ...]
    versions: tuple[tuple[int, int], ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Place):
            return NotImplemented
        return self.row is other.row and (self.members, self.versions) == (other.members, other.versions)

    __hash__ = None  # type: ignore[assignment]


class Prefix:
    """Holds the hidden states before the active block of the last pass.

    Edits through ``.data`` do not change versions: after such an edit, call :meth:`forget`.

    Args:
        model: the model that will run.
        anatomy: the anatomy of the model.
        cuts: the cuts of its pass.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy, cuts: Cuts) -> None:
        self.model, self.anatomy, self.cuts = model, anatomy, cuts
        self.skipped = 0
        """Number of layers that have been skipped so far."""
        self._place: _Place | None = None
        self._hidden: Tensor | None = None

    def forget(self) -> None:
        """Compute the prefix again in the next pass."""
        self._place = self._hidden = None

    @contextlib.contextmanager
    def passing(self, row: Row, members: Sequence[Member]) -> Iterator[None]:
        """A context in which the model runs once on a row: its prefix is skipped or kept."""
        pieces = (self.cuts.piece(module) for module, _ in self.anatomy.stages(members))
        layers = self.cuts.layers[: max(0, min(pieces) - 1)]  # piece 0 comes before the first layer
        if not layers:
            self.forget()
            yield
            return
        place = self._at(row, members)
        held = self._hidden if self._place == place else None
        self.forget()  # a pass that fails leaves nothing behind
        kept: list[Tensor] = []
        replaced: list[tuple[nn.Module, Forward | None]] = []
        with uninterrupted() as shield:
            try:
                for i, layer in enumerate(layers):
                    last = i == len(layers) - 1
                    if held is None and not last:
                        continue
                    replaced.append((layer, vars(layer).get("forward")))
                    mine = self._skip(i, held if last else None) if held is not None else _keep(layer, kept)
                    vars(layer)["forward"] = mine
                with shield.opened():
                    yield
            finally:
                for layer, before in reversed(replaced):
                    restore(layer, before)
        self.skipped += len(layers) if held is not None else 0
        self._place, self._hidden = place, kept[0] if held is None else held

    def _at(self, row: Row, members: Sequence[Member]) -> _Place:
        active = {id(member.param) for member in members}
        tensors = (*self.model.parameters(), *self.model.buffers())
        versions = tuple((t.data_ptr(), t._version) for t in tensors if id(t) not in active)
        return _Place(row, tuple(sorted(active)), versions)

    def _skip(self, i: int, held: Tensor | None) -> Forward:
        """A layer's forward that passes its hidden states on, or returns the held ones."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            return put(self.cuts.templates[i], hidden_of(args, kwargs) if held is None else held)

        return forward


def _keep(layer: nn.Module, kept: list[Tensor]) -> Forward:
    """A layer's forward that also keeps its result."""
    inner = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        kept.append(first(out))
        return out

    return forward
