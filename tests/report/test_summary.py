"""The summary: which step dev selects, and whether the run got worse."""

from __future__ import annotations

from typing import Any

import pytest

from zeroblock.evaluate.evaluator import Evaluation
from zeroblock.evaluate.measurement import Measurement
from zeroblock.report.card import Facts, hub_card
from zeroblock.report.summary import select, setback
from zeroblock.train.config import Config


def test_selection() -> None:
    def found(value: float, loss: float) -> Evaluation:
        return Evaluation("accuracy", value, loss, 1, 0.0)

    nan = float("nan")
    points = {8: found(0.9, 0.7), 4: found(0.7, 0.5), 12: found(0.9, nan), 16: found(0.8, 0.5)}
    assert select(points, by_loss=True) == 4
    assert select(points, by_loss=False) == 8
    assert select({2: found(0.5, nan), 3: found(0.5, 9.0)}, by_loss=True) == 3


BETTER: dict[str, Any] = {
    "method": "mezo_bcd", "metric": "accuracy", "selected_by": "dev loss", "lr": 3e-4, "clip": None,
    "dev": {"value": 0.5, "loss": 0.6, "n": 40}, "test": {"selected": 0.625, "n": 40},
    "zero_shot": {"dev": 0.5, "test": 0.65}, "zero_shot_loss": {"dev": 0.7, "test": 0.7},
}  # fmt: skip
"""A lower loss, and one test example fewer, which is chance."""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"dev": {"value": 0.5, "loss": 0.7001, "n": 40}}, ""),
        ({"dev": {"value": 0.5, "loss": 0.71, "n": 40}}, "dev loss 0.7100, was 0.7000"),
        ({"dev": {"value": 0.5, "loss": float("nan"), "n": 40}}, "dev loss is not finite, was 0.7000. Try"),
        ({"test": {"selected": 0.55, "n": 40}}, "test accuracy 55.0%, was 65.0%. Try a smaller learning rate"),
        ({"test": {"selected": 0.55, "n": 4}}, ""),
        ({"test": {"selected": 0.1, "n": 4}, "clip": 2.0}, "(--lr 1e-4) or more --steps"),
        ({"test": {"selected": 0.1, "n": 4}, "method": "ft"}, "(--lr 1e-4) or more --steps"),
        ({"selected_by": "dev accuracy", "dev": {"value": 0.3, "loss": 0.6, "n": 40}}, "dev accuracy 30.0%, was 50.0%"),
        ({"test": {"selected": 0.1, "n": 4}, "zero_shot": {}}, ""),
        ({"test": {"selected": 0.1, "n": 4}, "zero_shot": {"test": "much"}}, ""),
    ],
)  # fmt: skip
def test_a_setback_is_more_than_chance(changes: dict[str, Any], said: str) -> None:
    found = setback({**BETTER, **changes})
    assert said in found
    assert bool(found) == bool(said)


def test_the_card_of_free_text_shows_its_loss() -> None:
    config = Config(model="smollm2", task="mine.jsonl", lr=1e-3, steps=4, metric="likelihood")
    points = [(0, "dev", 2.5), (0, "test", 2.25), (4, "dev", 1.5), (4, "test", 1.25)]
    found = [Measurement(step, split, Evaluation("likelihood", 0.1, loss, 8, 0.0), 0.0) for step, split, loss in points]
    card = hub_card(Facts(config, 4, "dev loss", tuple(found)), "model")
    assert "| loss | dev (n = 8) | test (n = 8) |" in card
    assert "| **step 4** | 1.5000 | 1.2500 |" in card
