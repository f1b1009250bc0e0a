"""The split protocol: sizes, one permutation, nothing twice."""

from __future__ import annotations

import numpy as np
import pytest

from zeroblock.task import TASKS, Sizes, Split


def test_protocol():
    found = Split.of(3500, 1200, Sizes(), seed=42)
    order = np.random.RandomState(42).permutation(3500)
    assert found.train == tuple(order[:1000])
    assert found.dev == tuple(order[1000:1500])
    assert found.test == tuple(np.random.RandomState(42).permutation(1200)[:1000])
    assert not found.held_out
    assert found.note == ""


def test_the_permutation_is_frozen():
    """numpy's legacy stream, written down: the rows of a seed are the same for ever."""
    assert Split.of(10, 5, Sizes(train=None), seed=0).train == (2, 8, 4, 9, 1, 6, 7, 3)
    assert Split.of(10, 5, Sizes(train=None), seed=0).dev == (0, 5)
    assert Split.of(10, 5, Sizes(train=None), seed=0).test == (2, 0, 1, 3, 4)


def test_another_seed_is_another_split():
    assert Split.of(3500, 900, Sizes(), 0).train != Split.of(3500, 900, Sizes(), 1).train


@pytest.mark.parametrize(
    ("name", "rows", "validation", "sizes"),
    [
        ("sst2", 3500, 872, (1000, 500, 872)),
        ("cb", 250, 56, (150, 100, 56)),
        ("copa", 400, 100, (300, 100, 100)),
        ("wsc", 554, 104, (54, 500, 104)),
        ("record", 214, 208, (143, 71, 208)),
        ("rte", 1500, 277, (1000, 500, 277)),
        ("rte", 1499, 277, (999, 500, 277)),
        ("rte", 532, 277, (32, 500, 277)),
        ("rte", 531, 277, (354, 177, 277)),
        ("rte", 3, 1, (2, 1, 1)),
        ("rte", 1, 1, (1, 0, 1)),
        ("reviews", 8990, 1000, (8490, 500, 1000)),
        ("reviews", 100, 10, (80, 20, 10)),
    ],
)
def test_sizes(name, rows, validation, sizes):
    found = Split.of(rows, validation, TASKS[name].sizes, seed=7)
    assert tuple(map(len, (found.train, found.dev, found.test))) == sizes


@pytest.mark.parametrize("rows", [1, 2, 5, 33, 250, 554, 1600])
@pytest.mark.parametrize("validation", [None, 1, 70])
@pytest.mark.parametrize("sizes", [Sizes(), Sizes(dev=100), Sizes(train=None), Sizes(train=8, dev=8, test=8)])
def test_no_row_twice(rows, validation, sizes):
    found = Split.of(rows, validation, sizes, seed=3)
    pool = found.train + found.dev + (found.test if found.held_out else ())
    assert len(set(pool)) == len(pool)
    assert set(pool) <= set(range(rows))
    assert len(set(found.test)) == len(found.test)
    assert found.train
    assert found.held_out is (validation is None)


def test_small_sizes_are_honoured():
    found = Split.of(100, 50, Sizes(train=8, dev=4, test=2), seed=0)
    assert tuple(map(len, (found.train, found.dev, found.test))) == (8, 4, 2)


def test_held_out():
    found = Split.of(1000, None, Sizes(train=None), seed=0)
    assert tuple(map(len, (found.train, found.dev, found.test))) == (640, 160, 200)
    assert "held out" in found.note


def test_the_note_says_what_is_short():
    note = Split.of(214, 208, Sizes(), seed=0).note
    assert note == "fewer rows than would be used: 143 train (of 1000), 71 dev (of 500), 208 test (of 1000)"
