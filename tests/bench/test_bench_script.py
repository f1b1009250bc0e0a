"""The scripts of ``bench/``: they run as written, and append rows that name the machine."""

from __future__ import annotations

import csv
import itertools
import runpy
import sys
from pathlib import Path

import pytest
import torch

from zeroblock.bench import script

FOLDER = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_every_script_says_how_it_is_called(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    assert f"python bench/{path.name}" in capsys.readouterr().out


def test_noise_on_a_few_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "results" / "noise.csv"
    words = ["noise.py", "--device", "cpu", "--numel", "4096", "--csv", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    for _ in range(2):
        runpy.run_path(str(FOLDER / "noise.py"), run_name="__main__")
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    first, second = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    assert [(row["operation"], row["dtype"]) for row in first] == [(row["operation"], row["dtype"]) for row in second]
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16", "float16"}
    assert all(float(row["elements_per_s"]) > 0 and row["machine"] and row["torch"] for row in rows)


def test_integers_of_a_small_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that counts its readings: processor time of so little work may be zero."""
    monkeypatch.setattr("time.process_time", itertools.count().__next__)
    out = tmp_path / "integer.csv"
    threads = str(torch.get_num_threads())
    monkeypatch.setattr(
        sys, "argv", ["integer.py", "--size", "64", "--repeats", "1", "--threads", threads, "--csv", str(out)]
    )
    runpy.run_path(str(FOLDER / "integer.py"), run_name="__main__")
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["weights"] for row in rows] == ["int8"] * 4 + ["int4"] * 4
    assert all(float(row[f"{version}_ms"]) == 1000 for row in rows for version in ("compiled", "plain", "float"))


def test_a_csv_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit, match="has other columns: give another --csv"):
        script.append(str(path), [{"operation": "copy"}], "cpu")
    assert path.read_text() == "a,b\n1,2\n"
    with pytest.raises(SystemExit, match="cannot write to"):
        script.writable(str(path / "below.csv"))


@pytest.mark.parametrize("text", ["0", "-3", "many"])
def test_counts_are_positive(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (argparse names the value)
        script.positive(text)


def test_seconds_are_the_median_of_the_calls_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, durations = 0.0, iter([50.0, 50.0, 1.0, 7.0, 2.0])

    def run() -> None:
        nonlocal clock
        clock += next(durations)

    monkeypatch.setattr("time.perf_counter", lambda: clock)
    assert script.seconds(run, "cpu", repeats=3, warm=2) == 2.0
