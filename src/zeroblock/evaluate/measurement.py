"""Measurements: the evaluations of a run, each with its step, as lines of ``metrics.jsonl``."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from .evaluator import Evaluation


@dataclasses.dataclass(frozen=True)
class Measurement:
    """An evaluation in a run.

    Args:
        step: after how many steps.
        split: ``dev`` or ``test``.
        evaluation: what came out.
        elapsed: seconds that the run had taken by then.
    """

    step: int
    split: str
    evaluation: Evaluation
    elapsed: float

    def line(self) -> dict[str, Any]:
        """As in ``metrics.jsonl``."""
        found = {"kind": "eval", "step": self.step, "split": self.split, **dataclasses.asdict(self.evaluation)}
        found["elapsed"] = round(self.elapsed, 3)
        found["seconds"] = round(self.evaluation.seconds, 3)
        return {k: plain(v) for k, v in found.items() if k != "exact_match" or v is not None}

    @classmethod
    def of(cls, line: dict[str, Any]) -> Measurement:
        """From a line of ``metrics.jsonl``."""
        values: dict[str, Any] = {field.name: line.get(field.name) for field in dataclasses.fields(Evaluation)}
        values["loss"] = math.nan if values["loss"] is None else values["loss"]
        return cls(line["step"], line["split"], Evaluation(**values), line["elapsed"])


def plain(value: Any) -> Any:
    """What JSON can say: not a number is nothing."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
