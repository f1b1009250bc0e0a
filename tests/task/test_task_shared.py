"""On real rows, where they lie beside the project: every one of them renders, and the splits have their sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from zeroblock.task import TASKS

DATA = Path(__file__).parents[3] / "shared" / "data"
ELEVEN = [name for name in TASKS if name != "reviews"]

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="no local copies of the tasks beside the project")


@pytest.mark.parametrize("name", ELEVEN)
def test_every_row_renders(name):
    task = TASKS[name]
    for part in ("train", "validation"):
        rows = task.rows(part, DATA)
        examples = [task.example(row) for row in rows]
        assert len(examples) == len(rows) > 30
        for example in examples:
            text = example.context + example.target
            assert text == text.strip(" ")
            assert not example.context.endswith(" ")
            newline = example.context.endswith("\n")
            assert all(option.startswith(" ") != newline for option in example.options)
            assert bool(example.answers) == (task.kind == "generation")
        if task.kind != "generation":
            assert len({example.label for example in examples}) > 1


@pytest.mark.parametrize("name", ELEVEN)
@pytest.mark.parametrize("seed", [0, 42])
def test_split_protocol(name, seed):
    task = TASKS[name]
    splits = task.load(DATA, seed=seed)
    rows, held = task.rows("train", DATA), task.rows("validation", DATA)
    order = np.random.RandomState(seed).permutation(len(rows))[:1500]
    dev = 100 if name in ("cb", "copa") else 500
    if name == "record":  # fewer rows than dev alone
        assert len(splits.train) + len(splits.dev) == len(rows)
        dev = len(splits.dev)
    if len(rows) >= 1500:
        assert (len(splits.train), len(splits.dev)) == (1000, 500)
    together = splits.train + splits.dev
    assert together == tuple(task.example(rows[i]) for i in order[: 1000 + dev])
    assert splits.dev == together[-dev:]
    test = np.random.RandomState(seed).permutation(len(held))[:1000]
    assert splits.test == tuple(task.example(held[i]) for i in test)
    assert bool(splits.note) == (len(rows) < 1500 or len(held) < 1000)
