"""Batches: the examples of each step, a pure function of the data seed and the step."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..noise import Key
from ..task import Encoded
from ..task.draw import DATA, EPOCH, draw


@dataclass(frozen=True)
class Batches:
    """One random permutation of the examples per epoch, cut into consecutive batches that may span two epochs.

    Args:
        examples: the number of examples; may be less than a batch.
        size: examples per batch.
        seed: the data seed.

    >>> batches = Batches(examples=5, size=3, seed=0)
    >>> sorted(batches.at(0) + batches.at(1)[:2])
    [0, 1, 2, 3, 4]
    """

    examples: int
    size: int
    seed: int

    def at(self, step: int) -> tuple[int, ...]:
        """The indices of the examples of a step."""
        positions = range(step * self.size, (step + 1) * self.size)
        return tuple(shuffle(self.examples, self.seed, p // self.examples)[p % self.examples] for p in positions)


@functools.lru_cache(maxsize=4)
def shuffle(n: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Permute ``range(n)`` with the library's counter-based generator."""
    return draw(n, n, Key(seed, epoch, EPOCH, DATA))


def fingerprint(encoded: Sequence[Encoded], labels: Sequence[int]) -> str:
    """Digest the training data in order: token ids, labels, and the tokens that carry loss unless all do."""
    return digest(
        (one.context, one.options, label, *([] if one.scored is None else [one.scored]))
        for one, label in zip(encoded, labels, strict=True)
    )


def digest(values: Iterable[object]) -> str:
    """Digest plain values, in order, into 32 letters."""
    state = hashlib.sha256()
    for value in values:
        state.update(repr(value).encode())
    return state.hexdigest()[:32]
