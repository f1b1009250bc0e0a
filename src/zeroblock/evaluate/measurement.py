"""Measurements: the evaluations of a run, each with its step, as lines of ``metrics.jsonl``."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import shown
from .evaluator import Evaluation

SPLITS = ("dev", "test")
"""The splits that a run is evaluated on."""
MAX_FLOAT = 3.5e38
"""No loss, metric or time of a run is larger: they come from float32."""
MAX_SHOWN = 60
"""Characters of a bad value that a message shows."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """An evaluation in a run.

    Args:
        step: the number of steps taken.
        split: ``dev`` or ``test``.
        evaluation: the results.
        elapsed: seconds that the run has taken so far.
    """

    step: int
    split: str
    evaluation: Evaluation
    elapsed: float

    def line(self) -> dict[str, Any]:
        """The measurement as an object of ``metrics.jsonl``."""
        values = {"kind": "eval", "step": self.step, "split": self.split, **dataclasses.asdict(self.evaluation)}
        values["elapsed"] = round(self.elapsed, 3)
        values["seconds"] = round(self.evaluation.seconds, 3)
        return {k: plain(v) for k, v in values.items() if k != "exact_match" or v is not None}

    @classmethod
    def of(cls, line: Any) -> Measurement:
        """Make a measurement from an object of ``metrics.jsonl``; a ValueError says what is wrong with it."""
        if not isinstance(line, dict):
            raise ValueError("not a JSON object")
        values: dict[str, Any] = {name: line.get(name) for name in _TYPES}
        values["loss"] = math.nan if values["loss"] is None else values["loss"]
        for name, kinds in _TYPES.items():
            optional = name == "exact_match" and values[name] is None
            missing = name == "loss" and line.get("loss") is None
            if not optional and not missing and not _fits(name, values[name], kinds):
                raise ValueError(f"{name} is {shown(repr(values[name]), MAX_SHOWN)}")
        step, split, elapsed = (values.pop(name) for name in ("step", "split", "elapsed"))
        return cls(step, split, Evaluation(**values), elapsed)


def _fits(name: str, value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a value of a file has one of the types, and is one that a run can write."""
    if type(value) not in kinds:  # exactly: True is not a number
        return False
    if isinstance(value, str):
        return name != "split" or value in SPLITS
    return is_bounded(value) and (name not in ("step", "n") or value >= 0)


def is_bounded(number: float) -> bool:
    """Whether a number of a file is finite, and of a size that a run can write: float32 for floats, int64 for integers.

    Python compares exactly, so an integer too large for a float raises no error here.
    """
    return -(2**63) < number < 2**63 if isinstance(number, int) else abs(number) < MAX_FLOAT


_NUMBER = (int, float)
_TYPES: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "split": (str,),
    "elapsed": _NUMBER,
    "metric": (str,),
    "value": _NUMBER,
    "loss": _NUMBER,
    "n": (int,),
    "seconds": _NUMBER,
    "exact_match": _NUMBER,
}


def read_measurements(path: Path) -> Iterator[tuple[bytes, Measurement]]:
    """Read the measurements of ``metrics.jsonl``, each with its line; the first bad line raises a ValueError.

    Args:
        path: the file; one that is missing has no lines.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return
    for number, line in enumerate(lines, start=1):
        try:
            if not line.endswith(b"\n"):  # the next line would be joined to it
                raise ValueError("the line is cut")
            yield line, Measurement.of(json.loads(line.decode()))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number}: {error}") from error


def plain(value: Any) -> Any:
    """Replace numbers that are not finite by None, which JSON can write."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
