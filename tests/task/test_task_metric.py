"""Metrics against a slow, obvious computation."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroblock.task import METRICS, Example, accuracy, exact_match, f1
from zeroblock.task.metric import normalize


def gold(*answers):
    return Example("c", (f" {answers[0]}\n",), 0, answers)


def test_accuracy():
    one, several = Example("c", ("a", "b"), 1), Example("c", ("a", "b", "d"), (2, 0))
    assert [accuracy(i, one) for i in range(2)] == [0.0, 1.0]
    assert [accuracy(i, several) for i in range(3)] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat, an Ape; a dog.", "cat ape dog"),
        ("theatre", "theatre"),
        ("U.S.A.", "usa"),
        ("24–10", "24–10"),  # the dash is not ASCII punctuation: SQuAD's script keeps it
        (" a ", ""),
    ],
)
def test_normalize(text, normal):
    assert normalize(text) == normal


@pytest.mark.parametrize(
    ("prediction", "answers", "score", "exact"),
    [
        ("Jan", ["Jan"], 1.0, 1.0),
        ("the Jan.", ["jan"], 1.0, 1.0),
        ("Jan van Dam", ["Jan"], 0.5, 0.0),
        ("Jan", ["Jan van Dam", "van Dam", "Jan Dam"], 2 / 3, 0.0),
        ("red red blue", ["red blue blue"], 2 / 3, 0.0),
        ("no", ["yes"], 0.0, 0.0),
        ("", ["yes"], 0.0, 0.0),
        ("A", ["A"], 1.0, 1.0),
        ("yes", ["no", "yes"], 1.0, 1.0),
    ],
)
def test_f1_and_exact_match(prediction, answers, score, exact):
    assert f1(prediction, gold(*answers)) == pytest.approx(score)
    assert exact_match(prediction, gold(*answers)) == exact


def slow_f1(prediction, answer):
    def tokens(text):
        text = "".join(c for c in text.lower() if c not in string.punctuation)
        return [word for word in text.split() if word not in ("a", "an", "the")]

    p, g = tokens(prediction), tokens(answer)
    if not p or not g:
        return float(p == g)
    left, same = list(g), 0
    for word in p:
        if word in left:
            left.remove(word)
            same += 1
    if not same:
        return 0.0
    precision, recall = same / len(p), same / len(g)
    return 2 * precision * recall / (precision + recall)


words = st.lists(st.sampled_from(["the", "The", "a", "red", "Red,", "blue", "5", "5."]), max_size=6).map(" ".join)


@given(words, st.lists(words.filter(str.strip), min_size=1, max_size=3))
def test_f1_is_the_best_over_the_golds(prediction, answers):
    assert f1(prediction, gold(*answers)) == pytest.approx(max(slow_f1(prediction, answer) for answer in answers))


def test_table():
    assert {name: metric.generates for name, metric in METRICS.items()} == {
        "accuracy": False,
        "f1": True,
        "exact_match": True,
        "likelihood": False,
    }
