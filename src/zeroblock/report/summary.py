"""The result of a run, computed from its evaluations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..errors import shown
from ..evaluate.evaluator import Evaluation
from ..evaluate.measurement import MAX_SHOWN, SPLITS, Measurement, is_bounded
from ..train.config import Config

_NUMBER = (int, float)
_OPTIONAL = (int, float, type(None))
SHAPE: dict[str, Any] = {
    "task": str,
    "method": str,
    "metric": str,
    "selected_step": int,
    "selected_by": str,
    "steps": int,
    "seconds": _NUMBER,
    "blocks": _OPTIONAL,
    "skipped": _OPTIONAL,
    "peak_memory": _OPTIONAL,
    "dev": {"value": _NUMBER, "n": int, "exact_match": _OPTIONAL},
    "test": {"selected": _NUMBER, "best": _NUMBER, "best_step": int, "n": int, "exact_match": _OPTIONAL},
}
"""The entries of ``summary.json`` that others rely on, with their types."""
MAX_BLOCKS = 100_000
"""The linear layers of the largest mixtures of experts are half as many; a figure of more would fill the memory."""


def summarize(config: Config, measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Report the dev-selected result, and beside it the paper's: the best test value of all evaluations.

    An evaluation before the first step of a training run is its zero-shot result, and is never selected.

    Args:
        config: of the run.
        measurements: dev and test at every evaluated step.
    """
    points: dict[int, dict[str, Evaluation]] = {}
    for one in measurements:
        points.setdefault(one.step, {})[one.split] = one.evaluation
    # a file may hold half an evaluation at a step where the run makes none
    points = {step: splits for step, splits in points.items() if splits.keys() >= set(SPLITS)}
    after = {step: splits for step, splits in points.items() if step > 0 or not config.trains}
    by_loss = config.objective == "loss"
    chosen = select({step: splits["dev"] for step, splits in after.items()}, by_loss)
    best = max(after, key=lambda step: after[step]["test"].value)
    dev, test = after[chosen]["dev"], after[chosen]["test"]
    summary: dict[str, Any] = {
        "task": config.task,
        "method": config.method,
        "model": config.model,
        "metric": dev.metric,
        "objective": config.objective,
        "selected_step": chosen,
        "selected_by": "dev loss" if by_loss else f"dev {dev.metric}",
        "dev": {"value": dev.value, "loss": dev.loss, "n": dev.n},
        "test": {
            "selected": test.value,
            "best": after[best]["test"].value,
            "best_step": best,
            "loss": test.loss,
            "n": test.n,
        },
    }
    for split, evaluation in (("dev", dev), ("test", test)):
        if evaluation.exact_match is not None:
            summary[split]["exact_match"] = evaluation.exact_match
    if config.trains and 0 in points:
        summary["zero_shot"] = {split: evaluation.value for split, evaluation in points[0].items()}
    return summary


def select(evaluations: dict[int, Evaluation], by_loss: bool) -> int:
    """Select the step to report: the lowest dev loss, as in MeZO, or the highest dev metric; the first of equals.

    Args:
        evaluations: on dev, by step.
        by_loss: which of the two.
    """

    def merit(step: int) -> float:
        evaluation = evaluations[step]
        value = -evaluation.loss if by_loss else evaluation.value
        return -math.inf if math.isnan(value) else value  # a run that diverged comes last

    return max(sorted(evaluations), key=merit)


def check_summary(summary: Any) -> dict[str, Any]:
    """Return the content of a ``summary.json`` if it is one; a ValueError says what is wrong with it."""
    _check("it", summary, SHAPE)
    if not 0 <= (summary.get("blocks") or 0) <= MAX_BLOCKS:
        raise ValueError(f"blocks is {summary['blocks']}")
    result: dict[str, Any] = summary
    return result


def _check(name: str, value: Any, shape: Any) -> None:
    if not isinstance(shape, dict):
        number = isinstance(value, (int, float))
        if not isinstance(value, shape) or isinstance(value, bool) or (number and not is_bounded(value)):
            raise ValueError(f"{name} is {shown(repr(value), MAX_SHOWN)}")
        return
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {type(value).__name__}, not an object")
    for key, inner in shape.items():
        if key not in value and inner is not _OPTIONAL:
            raise ValueError(f"{key} is missing")
        _check(key, value.get(key), inner)
