"""Which examples a step sees: a pure function of the data seed and of the step."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..noise import Key
from ..task import Encoded
from ..task.draw import DATA, EPOCH, draw


@dataclass(frozen=True)
class Order:
    """Batches: one random permutation an epoch, cut into consecutive slices that may straddle two epochs.

    Args:
        examples: how many there are; fewer than a batch is fine.
        size: of a batch.
        seed: the data seed.

    >>> order = Order(examples=5, size=3, seed=0)
    >>> sorted(order.batch(0) + order.batch(1)[:2])
    [0, 1, 2, 3, 4]
    """

    examples: int
    size: int
    seed: int

    def batch(self, step: int) -> tuple[int, ...]:
        """The examples' indices at a step."""
        places = range(step * self.size, (step + 1) * self.size)
        return tuple(shuffle(self.examples, self.seed, p // self.examples)[p % self.examples] for p in places)


@functools.lru_cache(maxsize=4)
def shuffle(n: int, seed: int, epoch: int) -> tuple[int, ...]:
    """A permutation of ``range(n)`` by the library's counter generator."""
    return draw(n, n, Key(seed, epoch, EPOCH, DATA))


def fingerprint(encoded: Sequence[Encoded], labels: Sequence[int]) -> str:
    """A digest of what the model is trained on: token ids and labels, in order."""
    return digest((one.context, one.options, label) for one, label in zip(encoded, labels, strict=True))


def digest(values: Iterable[object]) -> str:
    """32 letters that stand for plain values, in order."""
    found = hashlib.sha256()
    for value in values:
        found.update(repr(value).encode())
    return found.hexdigest()[:32]
