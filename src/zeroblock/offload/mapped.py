"""Weights that are used in place, in a file that the system reads and writes as memory allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..amount import words
from ..direction import Member
from .region import Region
from .shelf import Layer, Shelf, watch


class Mapped(Shelf):
    """A model on the CPU whose weights are a mapped file: larger than memory, if need be.

    A step writes to the mapping, and the system writes to the file.  The next layer is read ahead.  Layers that
    need not stay return their memory after they have run: otherwise the system would drop the least recently
    used pages, which are the first that the next pass needs.

    Args:
        layers: the layers in the order in which they run, at rest in the region.
        region: the file.
        kept: the number of layers, from the first, that stay in memory.
    """

    def __init__(self, layers: Sequence[Layer], region: Region, kept: int) -> None:
        super().__init__(torch.device("cpu"))
        self.layers, self.region, self.kept = list(layers), region, kept
        self._home = {id(tensor): i for i, layer in enumerate(layers) for tensor in layer.tensors}
        for i in range(len(layers)):
            self._leave(i)  # they were written here a moment ago
        self._ends = watch(self.layers, self._enter, self._leave)

    def _enter(self, i: int) -> None:
        following = self.layers[(i + 1) % len(self.layers)]
        self.region.soon(following.span)

    def _leave(self, i: int) -> None:
        if i >= self.kept:
            self.region.drop(self.layers[i].span)

    def visits(self, members: Sequence[Member], folds: bool = False) -> Iterator[Sequence[Member]]:
        groups: dict[int | None, list[Member]] = {}
        for member in members:
            groups.setdefault(self._home.get(id(member.param)), []).append(member)
        for i, mine in groups.items():
            yield mine
            if i is not None:
                self._leave(i)

    def describe(self) -> str:
        kept = "as many of them as the system has room for" if self.kept >= len(self.layers) else f"{self.kept} of them"
        return (
            f"the weights rest in a private file of the run ({words(len(self.region.flat))}), from which "
            f"{len(self.layers)} layers are read as they run; {kept} stay in memory"
        )

    def close(self) -> None:
        for end in self._ends:
            end()
