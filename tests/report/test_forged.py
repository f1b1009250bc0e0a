"""Files of a run folder with numbers that no run writes: one line, no traceback, no memory filled."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_page import folder

from zeroblock.errors import ZeroBlockError
from zeroblock.evaluate.evaluator import Evaluation
from zeroblock.evaluate.measurement import Measurement
from zeroblock.report.page import write_page
from zeroblock.report.summary import check_summary, summarize
from zeroblock.train.config import Config

HUGE = 10**400
LINE = {
    "kind": "eval", "step": 4, "split": "dev", "metric": "accuracy", "value": 0.5, "loss": 0.7, "n": 10,
    "seconds": 1.0, "elapsed": 2.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, HUGE) for name in ("step", "value", "loss", "elapsed", "seconds", "exact_match", "n")),
        *(("value", value) for value in (math.inf, math.nan, 1e300, None, True)),
        ("loss", math.inf),
        ("step", -1),
        ("n", -1),
        ("split", "train"),
    ],
)
def test_a_forged_evaluation_is_refused(name: str, value: Any) -> None:
    assert Measurement.of(LINE).step == 4
    with pytest.raises(ValueError, match=name) as caught:
        Measurement.of({**LINE, name: value})
    assert len(str(caught.value)) < 120


def test_a_loss_that_was_not_finite_is_read_as_it_was_written() -> None:
    measurement = Measurement(4, "dev", Evaluation("accuracy", 0.5, math.inf, 10, 1.0), 2.0)
    assert math.isnan(Measurement.of(json.loads(json.dumps(measurement.line()))).evaluation.loss)


def test_half_an_evaluation_is_never_selected() -> None:
    """A line at a step where the run makes no evaluation has no counterpart on the other split."""
    config = Config(model="smollm2", task="sst2", lr=1e-3, steps=10)
    measurements = [
        Measurement(step, split, Evaluation("accuracy", value, 1 - value, 10, 1.0), 2.0)
        for step, split, value in ((3, "dev", 0.99), (5, "test", 0.98), (10, "dev", 0.6), (10, "test", 0.7))
    ]
    summary = summarize(config, measurements)
    assert (summary["selected_step"], summary["test"]["best_step"]) == (10, 10)


def change(**values: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        summary = json.loads((path / "summary.json").read_text())
        for name, value in values.items():
            outer, _, inner = name.partition("__")
            if inner:
                summary[outer][inner] = value
            else:
                summary[outer] = value
        (path / "summary.json").write_text(json.dumps(summary))

    return write


def row(text: str) -> Callable[[Path], None]:
    return lambda path: (path / "steps.csv").write_text(f"step,block,loss,lr,coeff\n0,1,0.5,1,1\n{text}\n") and None


@pytest.mark.parametrize(
    ("forge", "name", "reason"),
    [
        *((change(**{key: HUGE}), "summary.json", key) for key in ("seconds", "peak_memory", "selected_step", "steps")),
        (change(dev__value=HUGE), "summary.json", "value"),
        (change(dev__value=math.nan), "summary.json", "value"),
        (change(blocks=math.inf), "summary.json", "blocks"),
        (change(blocks=3 * 10**9), "summary.json", "blocks"),
        (change(blocks=-1), "summary.json", "blocks"),
        (row("1,3000000000,0.5,1,1"), "steps.csv", "block"),
        (row("1,8,0.5,1,1"), "steps.csv", "block"),
        (row("1,-5,0.5,1,1"), "steps.csv", "block"),
        (row(f"{HUGE},1,0.5,1,1"), "steps.csv", "step"),
        (row("-1,1,0.5,1,1"), "steps.csv", "step"),
    ],
)
def test_forged_numbers_are_one_line(forge: Callable[[Path], None], name: str, reason: str, tmp_path: Path) -> None:
    path = folder(tmp_path, blocks=8)
    forge(path)
    with pytest.raises(ZeroBlockError, match=rf"{name} is damaged \({reason} is ") as caught:
        write_page(path)
    assert len(str(caught.value)) < 300


def test_extreme_numbers_are_drawn(tmp_path: Path) -> None:
    path = folder(tmp_path)
    row("1,7,1e308,1,1\n2,7,-1e308,1,1\n3,1,1e999,1,1")(path)
    metrics = path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"value": 0.5,', '"value": 3e38,'))
    write_page(path)
    assert (path / "figures" / "loss.png").is_file()


def test_a_missing_exact_match_is_sound(tmp_path: Path) -> None:
    summary = json.loads((folder(tmp_path) / "summary.json").read_text())
    summary["dev"]["exact_match"] = None
    assert check_summary(summary) is summary


def test_names_are_text_and_nothing_else(tmp_path: Path) -> None:
    """Neither formulas for the figures nor control characters in the page."""
    path = folder(tmp_path)
    change(metric="$\\nothing{$\x1b[2J", selected_by="$^$")(path)
    config = (path / "config.toml").read_text()
    (path / "config.toml").write_text(f"# zeroblock \x1b[2J\n{config.partition(chr(10))[2]}".replace("\x1b", "\x9b"))
    write_page(path)
    text = (path / "summary.md").read_text()
    assert "| $\\nothing{$\\x1b[2J | dev" in text
    assert "zeroblock \\x9b[2J" in text
    assert not [c for c in text if not c.isprintable() and c != "\n"]
    assert (path / "figures" / "metric.png").is_file()
