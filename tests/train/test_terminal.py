"""Text of somebody else's files reaches a terminal without its control characters."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from loop_toy import Kill, settings
from rich.console import Console
from typer.testing import CliRunner

from zeroblock.cli import app
from zeroblock.report.view import Lines
from zeroblock.train import run

ESCAPE = "\x1b]0;planted\x07"
C1 = "\x9b2J"  # one character that some terminals read as the start of a sequence


def printed(*arguments: Any) -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done.output


def assert_harmless(text: str) -> None:
    assert not [c for c in text if not c.isprintable() and c != "\n"]


def test_the_summary_of_a_folder(llama: Path, data: Path, tmp_path: Path) -> None:
    folder = run(settings(llama, data, steps=2, eval_every=2), tmp_path / "run").folder
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.md").unlink()
    foreign = {name: f"{name}{ESCAPE}" for name in ("task", "method", "metric", "selected_by")}
    (folder / "summary.json").write_text(json.dumps({**summary, **foreign}))
    text = printed("resume", folder)
    assert_harmless(text)
    assert r"metric\x1b]0;planted\x07" in text
    assert "selected_by" in text


def test_the_evaluations_of_a_folder(llama: Path, data: Path, tmp_path: Path) -> None:
    run(settings(llama, data, eval_every=10), tmp_path / "run", Kill(9))
    (tmp_path / "run" / "metrics.jsonl").write_text(
        "".join(
            json.dumps(
                {"kind": "eval", "step": 4, "split": split, "metric": f"mine{ESCAPE}", "value": 1.0, "loss": 0.0}
                | {"n": 10, "seconds": 1.0, "elapsed": 2.0}
            )
            + "\n"
            for split in ("dev", "test")
        )
    )
    text = printed("resume", tmp_path / "run")
    assert_harmless(text)
    assert r"mine\x1b]0;planted\x07" in text


def test_prompts(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    row = {"prompt": f"first{ESCAPE}\nsecond{C1} é", "completion": f" yes{ESCAPE}"}
    file.write_text("".join(json.dumps(row) + "\n" for _ in range(3)))
    text = printed("tasks", "show", file, "--limit", 1)
    assert_harmless(text)
    assert "first\\x1b]0;planted\\x07\nsecond\\x9b2J é\n" in text
    text = printed("tasks", "show", file, "--limit", 1, "--json")
    assert_harmless(text)
    assert json.loads(text)["context"] == row["prompt"]


def test_notes() -> None:
    stream = io.StringIO()
    Lines(Console(file=stream, width=200)).note(f"damaged{ESCAPE}")
    assert stream.getvalue() == "damaged\\x1b]0;planted\\x07\n"


def test_why_a_run_of_a_sweep_failed(llama: Path, tmp_path: Path) -> None:
    """The sweep file names data that are not there."""
    file = tmp_path / "sweep.toml"
    settings = {"model": str(llama), "task": "sst2", "data": f"nowhere{ESCAPE}", "method": "zero-shot"}
    file.write_text("[run]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
    done = CliRunner().invoke(app, ["sweep", str(file), "--out", str(tmp_path / "out")])
    assert done.exit_code == 1, done.output
    assert "fail   " in done.output
    assert r"nowhere\x1b]0;planted\x07" in done.output
    assert_harmless(done.output)
