"""The result of a run, computed from its evaluations."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ZeroBlockError, shown
from ..evaluate.evaluator import Evaluation
from ..evaluate.measurement import MAX_SHOWN, SPLITS, Measurement, is_bounded, read_measurements
from ..task.metric import is_loss, worded
from ..train.config import BACKPROPAGATION, Config, recorded

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
"""The entries of ``summary.json`` that other code relies on, with their types."""
MAX_LINE = 2000
"""Maximum characters of a command."""
MAX_BLOCKS = 100_000
"""The largest mixtures of experts have half as many linear layers; a figure of more blocks would fill the memory."""


RISE = 0.01
"""Fraction by which a loss must rise before a run is reported as worse."""
LOSS = "zero_shot_loss"
"""The entry of ``summary.json`` with the losses before training."""
ADAPTER = "adapter"
"""The subfolder of a run with the adapter of its selected step, as PEFT saves it."""
MODEL = "model"
"""The subfolder of a run for ``from_pretrained``: ``ft`` and the suggested ``zeroblock replay`` command write it."""


@dataclass(frozen=True)
class Selection:
    """The step of a run that its dev evaluations select.

    Args:
        step: the step.
        by: the criterion, such as ``dev loss``.
    """

    step: int
    by: str


def selection(folder: Path) -> Selection | None:
    """Find the step that dev selects in a run's folder; None if the run has no dev evaluation after a step.

    A run that has not finished has no summary, so its evaluations so far decide.

    Args:
        folder: the run's folder; damaged or missing files select nothing.
    """
    try:
        summary = check_summary(json.loads((folder / "summary.json").read_text(encoding="utf-8")))
        return Selection(summary["selected_step"], shown(summary["selected_by"])) if summary["steps"] else None
    except (OSError, ValueError, RecursionError):
        pass
    try:
        config = recorded(folder / "config.toml", trust_remote_code=True)  # no model is loaded here
        measurements = [one for _, one in read_measurements(folder / "metrics.jsonl")]
    except (OSError, ValueError, ZeroBlockError):
        return None
    return select_measured(config, measurements)


def select_measured(config: Config, measurements: Sequence[Measurement]) -> Selection | None:
    """Find the step that dev selects among the evaluations of a training run; None if there is none after a step."""
    _, after = _points(config, measurements)
    if not after or not config.trains:
        return None
    step = select({step: splits["dev"] for step, splits in after.items()}, config.objective == "loss")
    return Selection(step, _criterion(config, after[step]["dev"]))


def _points(config: Config, measurements: Sequence[Measurement]) -> tuple[Points, Points]:
    """The steps at which both splits were evaluated: all of them, and those that can be selected."""
    points: Points = {}
    for one in measurements:
        points.setdefault(one.step, {})[one.split] = one.evaluation
    # a forged file may hold only one of the splits, at a step that the run does not evaluate
    points = {step: splits for step, splits in points.items() if splits.keys() >= set(SPLITS)}
    return points, {step: splits for step, splits in points.items() if step > 0 or not config.trains}


def _criterion(config: Config, dev: Evaluation) -> str:
    return "dev loss" if config.objective == "loss" else f"dev {dev.metric}"


Points = dict[int, dict[str, Evaluation]]
"""The evaluations of each split, by step."""


def summarize(config: Config, measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Report the dev-selected result, and the paper's as well: the best test value of all evaluations.

    An evaluation before the first step of a training run is its zero-shot result, and is never selected.

    Args:
        config: the run's settings.
        measurements: dev and test at every evaluated step.
    """
    points, after = _points(config, measurements)
    chosen = select({step: splits["dev"] for step, splits in after.items()}, config.objective == "loss")
    best = max(after, key=lambda step: after[step]["test"].value)
    dev, test = after[chosen]["dev"], after[chosen]["test"]
    summary: dict[str, Any] = {
        "task": config.task,
        "method": config.method,
        "model": config.model,
        "metric": dev.metric,
        "objective": config.objective,
        "selected_step": chosen,
        "selected_by": _criterion(config, dev),
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
        summary[LOSS] = {split: evaluation.loss for split, evaluation in points[0].items()}
    if config.trains:
        summary["clip"] = config.clip
    return summary


def select(evaluations: dict[int, Evaluation], by_loss: bool) -> int:
    """Select the step to report: the lowest dev loss, as in MeZO, or the highest dev metric; the earliest of equals.

    Args:
        evaluations: the evaluations on dev, by step.
        by_loss: whether to select by loss.
    """

    def merit(step: int) -> float:
        evaluation = evaluations[step]
        value = -evaluation.loss if by_loss else evaluation.value
        return -math.inf if math.isnan(value) else value  # a run that diverged comes last

    return max(sorted(evaluations), key=merit)


def before(summary: Mapping[str, Any], split: str) -> str:
    """Write the loss, and metric and loss before training, to follow the metric; empty if not measured.

    >>> before({"dev": {"loss": 0.25}, "zero_shot": {"dev": 0.5}, "zero_shot_loss": {"dev": 0.75}}, "dev")
    ', loss 0.2500; before training 50.0%, loss 0.7500'
    """
    now, value, was = (_number(summary, *path) for path in ((split, "loss"), ("zero_shot", split), (LOSS, split)))
    if is_loss(summary.get("metric", "")):  # the loss is already at the start of the line
        return "" if was is None else f"; before training loss {was:.4f}"
    text = "" if now is None else f", loss {now:.4f}"
    if value is not None:
        text += f"; before training {value:.1%}" + ("" if was is None else f", loss {was:.4f}")
    return text


def setback(summary: Mapping[str, Any]) -> str:
    """Warn that a run ended worse than it began, with advice; empty if it did not.

    It compares the criterion of the selection on dev, and the metric on test, with their values before training.  A
    metric p on n examples has fallen if it lost more than its standard error, √(p(1 − p)/n): one example more or less
    is chance.  A loss has risen if it grew by more than the fraction ``RISE``.

    Args:
        summary: the summary of a training run; one without an evaluation before the first step is never worse.
    """
    found = []
    if summary["selected_by"] == "dev loss":
        was, now = _number(summary, LOSS, "dev"), _number(summary, "dev", "loss")
        if was is not None and (now is None or now > (1 + RISE) * was):
            found.append(f"dev loss {'is not finite' if now is None else f'{now:.4f}'}, was {was:.4f}")
    else:
        found += _fallen(summary, "dev", summary["dev"]["value"])
    found += _fallen(summary, "test", summary["test"]["selected"])
    if not found:
        return ""
    lr = _number(summary, "lr")
    smaller = f" (--lr {_short(lr / 3)})" if lr else ""
    own = "a learning rate of your own (--lr)" if lr is None else f"a smaller learning rate{smaller}"
    advice = [own, "more --steps"]
    if summary["method"] != BACKPROPAGATION and not summary.get("clip"):
        advice.insert(1, "--clip at a few times the usual coefficient (zeroblock inspect shows it)")
    return f"worse than before training: {'; '.join(found)}. Try {', '.join(advice[:-1])} or {advice[-1]}"


def _fallen(summary: Mapping[str, Any], split: str, now: float) -> list[str]:
    """Return a line if the metric on a split has fallen by more than chance, else nothing."""
    was, n = _number(summary, "zero_shot", split), max(1, summary[split]["n"])
    if was is None or now >= was - math.sqrt(max(0.0, was * (1 - was)) / n):
        return []
    metric = shown(summary["metric"])
    return [f"{split} {worded(metric, now)}, was {worded(metric, was).partition(' ')[2]}"]


def _short(number: float) -> str:
    """A learning rate as people write it.

    >>> _short(3.3e-4), _short(1.0)
    ('3e-4', '1e0')
    """
    mantissa, _, exponent = f"{number:.0e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _number(summary: Mapping[str, Any], *path: str) -> float | None:
    """Return a number of an untrusted summary; None if it is missing or not finite."""
    value: Any = summary
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and is_bounded(value) else None


def weights_line(folder: Path, summary: Mapping[str, Any]) -> str:
    """The command that rebuilds the weights of the selected step, or the folder of the weights or adapter, or nothing.

    Args:
        folder: the run's folder.
        summary: the run's result.
    """
    model, adapter = folder / MODEL, folder / ADAPTER
    if summary.get("adapter") and adapter.is_dir():
        return str(adapter)
    if (folder / "journal.zbj").is_file():
        return f"zeroblock replay {shlex.quote(str(folder))} --out {shlex.quote(str(model))}"
    return str(model) if summary["steps"] and model.is_dir() else ""


def weights_title(summary: Mapping[str, Any], why: str = "") -> str:
    """The words before :func:`weights_line`: the step, the reason for it, and the class that loads the result."""
    step = f"step {summary['selected_step']:,}{why}"
    adapted = bool(summary.get("adapter"))
    what, loader = ("adapter", "PeftModel.from_pretrained") if adapted else ("weights", "from_pretrained")
    return f"{what} of {step}, for {loader}"


def ending(folder: Path, summary: Mapping[str, Any]) -> list[str]:
    """The end of a run as lines of Markdown: a warning if it got worse, and how to get its weights."""
    lines = []
    if summary["steps"] and (warning := setback(summary)):
        lines += ["", "> [!CAUTION]", f"> This run got {warning}."]
    if line := weights_line(folder, summary):
        title = weights_title(summary, f", selected by {summary['selected_by']}")
        lines += ["", f"The {title}:", "", f"    {shown(line, MAX_LINE)}"]
    return lines


def check_summary(summary: Any) -> dict[str, Any]:
    """Return the content of a ``summary.json`` if it is valid; a ValueError says what is wrong with it."""
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
