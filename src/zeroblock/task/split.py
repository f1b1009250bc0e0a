"""The split protocol: which rows are for training, for development and for testing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

MIN_TRAIN = 32
"""Two batches of 16. If development would leave fewer rows to train on, it gets a third of the rows."""


@dataclass(frozen=True)
class Sizes:
    """How many examples to take.

    Args:
        train: training examples; None for all that dev (and test) leave.
        dev: development examples.
        test: test examples.
    """

    train: int | None = 1000
    dev: int = 500
    test: int = 1000


ALL = Sizes(train=None)
"""All rows, as for the user's own data."""


@dataclass(frozen=True)
class Split:
    """Row numbers, disjoint and never repeated.

    Args:
        train: rows of the train part to train on.
        dev: rows of the train part to choose the step and the hyperparameters.
        test: rows of the validation part; of the train part if ``held_out`` is true.
        held_out: whether there was no validation part.
        note: says if there are fewer rows than asked for, or if test is held out of train; else empty.
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
        same seed.  The generator is numpy's legacy one, which MeZO uses too and whose stream
        is frozen, so a seed picks the same rows as in MeZO.

        If there are too few rows, train shrinks first, as in the protocol (WSC has
        554 rows, of which 500 are for dev).  If that left fewer than 32 rows to train on,
        dev gets a third of the rows instead.  With ``sizes.train=None`` dev gets at most a
        fifth.  Without a validation part, at most a fifth is held out for test first.

        Args:
            rows: the number of rows in the train part.
            validation: the number of rows in the validation part; None if there is none.
            sizes: the number of rows to take for each split.
            seed: the data seed, for the permutation.

        >>> split = Split.of(214, 208, Sizes(), seed=0)
        >>> len(split.train), len(split.dev), len(split.test)
        (143, 71, 208)
        """
        rest = _permutation(rows, seed)
        if validation is None:
            size = min(sizes.test, rows // 5)
            rest, test = rest[: rows - size], rest[rows - size :]
        else:
            test = _permutation(validation, seed)[: sizes.test]
        if sizes.train is None:
            dev = min(sizes.dev, len(rest) // 5)
        else:
            rest = rest[: sizes.train + sizes.dev]
            dev = sizes.dev if len(rest) - sizes.dev >= min(MIN_TRAIN, sizes.train) else min(sizes.dev, len(rest) // 3)
        middle = len(rest) - dev
        split = cls(rest[:middle], rest[middle:], test, validation is None)
        return replace(split, note=_note(split, sizes))


def _permutation(rows: int, seed: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.random.RandomState(seed).permutation(rows))


def _note(split: Split, sizes: Sizes) -> str:
    wanted = (("train", sizes.train, split.train), ("dev", sizes.dev, split.dev), ("test", sizes.test, split.test))
    short = [f"{len(rows)} {name} (of {size})" for name, size, rows in wanted if size is not None and len(rows) < size]
    notes = [f"fewer rows than would be used: {', '.join(short)}"] if short else []
    notes += ["test rows are held out of train, because there is no validation part"] if split.held_out else []
    return "; ".join(notes)
