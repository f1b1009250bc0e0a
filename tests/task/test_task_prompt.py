"""Golden tests: every prompt, option, label, answer and calibration context of every task."""

from __future__ import annotations

import copy

import pytest
from task_rows import CASES, FIRST, GOLDEN

from zeroblock.errors import ZeroBlockError
from zeroblock.task import TASKS, DataRow, Example
from zeroblock.task.example import DataError, join


def test_every_task_has_a_golden_example():
    assert set(GOLDEN) == set(TASKS)


@pytest.mark.parametrize(("name", "row", "example"), CASES)
def test_golden(name, row, example):
    assert TASKS[name].example(DataRow(row)) == example


@pytest.mark.parametrize(
    ("name", "kind", "objective", "metric", "source"),
    [
        ("reviews", "classification", "options", "accuracy", "vaderSentiment==3.3.2"),
        ("sst2", "classification", "options", "accuracy", "glue/sst2"),
        ("rte", "classification", "options", "accuracy", "super_glue/rte"),
        ("cb", "classification", "options", "accuracy", "super_glue/cb"),
        ("boolq", "classification", "options", "accuracy", "super_glue/boolq"),
        ("wsc", "classification", "options", "accuracy", "super_glue/wsc.fixed"),
        ("wic", "classification", "options", "accuracy", "super_glue/wic"),
        ("multirc", "classification", "options", "accuracy", "super_glue/multirc"),
        ("copa", "choice", "answer", "accuracy", "super_glue/copa"),
        ("record", "choice", "answer", "accuracy", "super_glue/record"),
        ("squad", "generation", "answer", "f1", "squad"),
        ("drop", "generation", "answer", "f1", "drop"),
    ],
)
def test_what_a_task_is(name, kind, objective, metric, source):
    task = TASKS[name]
    assert (task.kind, task.over, task.metric.name, str(task.source)) == (kind, objective, metric, source)
    assert (task.stop, task.max_new_tokens) == ("\n", 50)
    assert task.sizes.dev == (100 if name in ("cb", "copa") else 500)


@pytest.mark.parametrize(("name", "row", "example"), FIRST)
def test_fields_are_those_that_are_read(name, row, example):
    """Every declared column is missed when it is not there, and no other is."""
    for field in TASKS[name].fields:
        lacking = copy.deepcopy(row)
        *path, last = field.split(".")
        inner = lacking
        for part in path:
            inner = inner[part]
        del inner[last]
        with pytest.raises(ZeroBlockError, match=rf"file:7: no column '{field}'"):
            TASKS[name].example(DataRow(lacking, "file:7"))
    kept = {field.split(".")[0] for field in TASKS[name].fields}
    assert TASKS[name].example(DataRow({key: row[key] for key in kept})) == example


def test_target_is_the_first_right_option():
    assert GOLDEN["record"][0][1].target == " The fans of Oslo FC sang all night."
    assert GOLDEN["copa"][1][1].target == " a car passed."


@pytest.mark.parametrize(
    ("prompt", "option", "context", "joined"),
    [
        ("a so ", "b", "a so", " b"),
        ("a\n", "b", "a\n", "b"),
        ("  a\n", "b\n", "a\n", "b\n"),
        ("a  ", " b ", "a", "   b"),
        (" ", "b", "", "b"),
    ],
)
def test_join_strips_spaces_and_never_newlines(prompt, option, context, joined):
    assert join(prompt, [option]) == (context, (joined,))


@pytest.mark.parametrize(
    ("options", "label", "message"),
    [
        ((), 0, "no options"),
        (("a", " "), 0, "option 2 of 2 is empty"),
        (("a", "\n"), 0, "option 2 of 2 is empty"),
        (("a", "b"), 2, "unknown label 2; expected 0 to 1"),
        (("a", "b"), -1, "unknown label -1"),
        (("a", "b"), (0, 5), "unknown label 5"),
        (("a", "b"), (), "no option is right"),
    ],
)
def test_example_refuses(options, label, message):
    with pytest.raises(DataError, match=message):
        Example("c", options, label)
