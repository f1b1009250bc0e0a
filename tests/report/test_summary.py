"""The summary: which step dev selects."""

from __future__ import annotations

from zeroblock.evaluate.evaluator import Evaluation
from zeroblock.report.summary import select


def test_selection() -> None:
    def found(value: float, loss: float) -> Evaluation:
        return Evaluation("accuracy", value, loss, 1, 0.0)

    nan = float("nan")
    points = {8: found(0.9, 0.7), 4: found(0.7, 0.5), 12: found(0.9, nan), 16: found(0.8, 0.5)}
    assert select(points, by_loss=True) == 4
    assert select(points, by_loss=False) == 8
    assert select({2: found(0.5, nan), 3: found(0.5, 9.0)}, by_loss=True) == 3
