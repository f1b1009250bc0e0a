"""The result of a run, read off its evaluations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..evaluate.evaluator import Evaluation
from ..evaluate.measurement import Measurement
from ..train.config import Config


def summarize(config: Config, measurements: Sequence[Measurement]) -> dict[str, Any]:
    """The dev-selected result, and the paper's beside it: the best test value of all evaluations.

    What was measured before the first step of a run that trains is its zero-shot result, and is not chosen.

    Args:
        config: of the run.
        measurements: dev and test at every evaluated step.
    """
    points: dict[int, dict[str, Evaluation]] = {}
    for one in measurements:
        points.setdefault(one.step, {})[one.split] = one.evaluation
    after = {step: found for step, found in points.items() if step > 0 or not config.trains}
    by_loss = config.objective == "loss"
    chosen = select({step: found["dev"] for step, found in after.items()}, by_loss)
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
    for split, found in (("dev", dev), ("test", test)):
        if found.exact_match is not None:
            summary[split]["exact_match"] = found.exact_match
    if config.trains and 0 in points:
        summary["zero_shot"] = {split: found.value for split, found in points[0].items()}
    return summary


def select(evaluations: dict[int, Evaluation], by_loss: bool) -> int:
    """The step to report: of the lowest dev loss, as in MeZO, or of the highest dev metric; the first of equals.

    Args:
        evaluations: on dev, by step.
        by_loss: which of the two.
    """

    def merit(step: int) -> float:
        found = evaluations[step]
        value = -found.loss if by_loss else found.value
        return -math.inf if math.isnan(value) else value  # a run that came to nothing comes last

    return max(sorted(evaluations), key=merit)
