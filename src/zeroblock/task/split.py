"""The split protocol: which rows are for training, for choosing and for testing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

FEWEST = 32  # two batches of 16: below this, a development set would eat the training set


@dataclass(frozen=True)
class Sizes:
    """How many examples are wanted.

    Args:
        train: training examples; None for all that dev (and test) leave.
        dev: development examples.
        test: test examples.
    """

    train: int | None = 1000
    dev: int = 500
    test: int = 1000


@dataclass(frozen=True)
class Split:
    """Row numbers, disjoint and never repeated.

    Args:
        train: rows of the train part to train on.
        dev: rows of the train part to choose by.
        test: rows of the validation part; of the train part where ``held_out`` is true.
        held_out: whether there was no validation part.
        note: in which way this is less than was wanted; empty where it is not.
    """

    train: tuple[int, ...]
    dev: tuple[int, ...]
    test: tuple[int, ...]
    held_out: bool = False
    note: str = ""

    @classmethod
    def of(cls, rows: int, validation: int | None, sizes: Sizes, seed: int) -> Split:
        """Split a dataset by the protocol.

        Train and dev are the first ``train + dev`` rows of the train part after a seeded
        permutation, dev the last of those; test is the validation part, permuted by the
        same seed.  The generator is numpy's legacy one, whose stream is frozen and which
        MeZO draws from, so the same seed picks the same rows as there.

        Where there are fewer rows, training gives way first, as in the protocol (WSC has
        554 rows, of which 500 are for dev).  If that left fewer than 32 rows to train on,
        dev is a third of the rows instead.  With ``sizes.train=None`` dev is at most a
        fifth.  Without a validation part, a fifth at most is held out for test first.

        Args:
            rows: rows of the train part.
            validation: rows of the validation part; None where there is none.
            sizes: how many are wanted.
            seed: seed of the permutation, the data seed.

        >>> found = Split.of(214, 208, Sizes(), seed=0)
        >>> len(found.train), len(found.dev), len(found.test)
        (143, 71, 208)
        """
        order = _permutation(rows, seed)
        if validation is None:
            size = min(sizes.test, rows // 5)
            order, test = order[: rows - size], order[rows - size :]
        else:
            test = _permutation(validation, seed)[: sizes.test]
        if sizes.train is None:
            dev = min(sizes.dev, len(order) // 5)
        else:
            order = order[: sizes.train + sizes.dev]
            dev = sizes.dev if len(order) - sizes.dev >= min(FEWEST, sizes.train) else min(sizes.dev, len(order) // 3)
        middle = len(order) - dev
        found = cls(order[:middle], order[middle:], test, validation is None)
        return replace(found, note=_note(found, sizes))


def _permutation(rows: int, seed: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.random.RandomState(seed).permutation(rows))


def _note(found: Split, sizes: Sizes) -> str:
    wanted = (("train", sizes.train, found.train), ("dev", sizes.dev, found.dev), ("test", sizes.test, found.test))
    short = [f"{len(rows)} {name} (of {size})" for name, size, rows in wanted if size is not None and len(rows) < size]
    held = ["test held out of train: there is no validation part"] if found.held_out else []
    return "; ".join(([f"fewer rows than asked for: {', '.join(short)}"] if short else []) + held)
