"""What a sweep makes of finished runs: choices by dev, what is due, tables against numbers worked out by hand."""

from __future__ import annotations

import csv
import json
import math
import tomllib
from pathlib import Path

import pytest

from zeroblock.errors import ZeroBlockError
from zeroblock.sweep import table
from zeroblock.sweep.outcome import Outcome, choose, due, folder_of, read
from zeroblock.sweep.plan import Cell, Run, Sweep

FILE = """
tune = ["lr"]
[run]
model = "smollm2"
steps = 10
[grid]
task = ["sst2", "squad"]
seed = [0, 1, 2]
[[case]]
name = "Zero-shot"
method = "zero-shot"
seed = 0
[[case]]
name = "MeZO"
method = "mezo"
lr = [1e-5, 1e-4]
"""


def sweep(text: str = FILE) -> Sweep:
    return Sweep.of("trial", tomllib.loads(text))


def finish(runs: Path, run: Run, dev: float, test: float, best: float, loss: float | None = 0.5) -> Path:
    """A run folder as a finished run leaves it, as far as a sweep looks."""
    folder = runs / run.name
    folder.mkdir(parents=True, exist_ok=True)
    summary = {
        "task": run.config.task,
        "metric": "f1" if run.config.task == "squad" else "accuracy",
        "steps": 10,
        "seconds": 90.0,
        "selected_step": 8,
        "dev": {"value": dev, "loss": loss, "n": 4},
        "test": {"selected": test, "best": best, "best_step": 4},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def cell_of(found: Sweep, row: str, task: str) -> Cell:
    return next(cell for cell in found.cells if (cell.row, cell.task) == (row, task))


def finish_sst2(found: Sweep, runs: Path) -> None:
    """Of two learning rates the first is better on dev, the second on test."""
    low, high = cell_of(found, "MeZO", "sst2").candidates
    for run, dev, test, best in zip(low.runs, (0.7, 0.8, 0.9), (0.6, 0.7, 0.74), (0.7, 0.7, 0.8), strict=True):
        finish(runs, run, dev, test, best)
    for run, dev in zip(high.runs, (0.95, 0.6, 0.6), strict=True):
        finish(runs, run, dev, 0.99, 0.99)
    finish(runs, cell_of(found, "Zero-shot", "sst2").candidates[0].runs[0], 0.5, 0.55, 0.55)


def test_dev_chooses_by_the_mean_over_seeds_never_by_test(tmp_path):
    found = sweep()
    finish_sst2(found, tmp_path)
    cell = cell_of(found, "MeZO", "sst2")
    assert choose(cell, read(found, tmp_path)) is cell.candidates[0]
    voting = sweep("tune_seeds = 1\n" + FILE)
    cell = cell_of(voting, "MeZO", "sst2")
    assert choose(cell, read(voting, tmp_path)) is cell.candidates[1]  # the first seed alone says otherwise


def test_equal_dev_is_told_apart_by_loss_then_by_order_and_nothing_beats_nan(tmp_path):
    found = sweep(FILE.replace("[0, 1, 2]", "[0]"))
    cell = cell_of(found, "MeZO", "sst2")
    low, high = (candidate.runs[0] for candidate in cell.candidates)
    finish(tmp_path, low, 0.7, 0.1, 0.1, loss=0.6)
    finish(tmp_path, high, 0.7, 0.1, 0.1, loss=0.5)
    assert choose(cell, read(found, tmp_path)) is cell.candidates[1]
    finish(tmp_path, high, 0.7, 0.1, 0.1, loss=0.6)
    assert choose(cell, read(found, tmp_path)) is cell.candidates[0]
    finish(tmp_path, low, 0.7, 0.1, 0.1, loss=None)
    assert choose(cell, read(found, tmp_path)) is cell.candidates[1]


def test_all_seeds_are_due_at_once_where_all_tune(tmp_path):
    found = sweep()
    assert len(due(found, {})) == 2 * (1 + 2 * 3)
    finish_sst2(found, tmp_path)
    left = due(found, read(found, tmp_path))
    assert {run.config.task for run in left} == {"squad"}
    assert len(left) == 7


def test_other_seeds_wait_for_the_choice_and_run_only_it(tmp_path):
    found = sweep("tune_seeds = 1\n" + FILE)
    cell = cell_of(found, "MeZO", "sst2")
    low, high = (candidate.runs[0] for candidate in cell.candidates)
    assert {run.config.seed for run in due(found, {})} == {0}
    finish(tmp_path, low, 0.6, 0.6, 0.6)
    assert [run.name for run in due(found, read(found, tmp_path)) if run.config.task == "sst2"][1:] == [high.name]
    finish(tmp_path, high, 0.7, 0.6, 0.6)
    later = [run for run in due(found, read(found, tmp_path)) if run.config.task == "sst2" and run.config.trains]
    assert [(run.config.lr, run.config.seed) for run in later] == [(1e-4, 1), (1e-4, 2)]


def test_a_failed_candidate_does_not_hold_up_the_others(tmp_path):
    found = sweep("tune_seeds = 1\n" + FILE)
    cell = cell_of(found, "MeZO", "sst2")
    low, high = (candidate.runs[0] for candidate in cell.candidates)
    finish(tmp_path, low, 0.6, 0.6, 0.6)
    left = due(found, read(found, tmp_path), failed={high.name})
    assert [(run.config.lr, run.config.seed) for run in left if run.config.task == "sst2" and run.config.trains] == [
        (1e-5, 1),
        (1e-5, 2),
    ]


def test_a_folder_is_known_by_its_digest_under_any_name(tmp_path):
    found = sweep()
    run = cell_of(found, "MeZO", "sst2").candidates[0].runs[0]
    assert folder_of(run, tmp_path) == tmp_path / run.name
    folder = finish(tmp_path, run, 0.7, 0.6, 0.7)
    moved = folder.rename(tmp_path / f"as-it-was-called-{run.digest}")
    assert folder_of(run, tmp_path) == moved
    assert read(found, tmp_path) == {run.name: Outcome.read(moved)}


def test_the_summary_of_something_else_is_named(tmp_path):
    (tmp_path / "summary.json").write_text('{"dev": {}}')
    with pytest.raises(ZeroBlockError, match=r"summary\.json is not the summary of a run \(KeyError"):
        Outcome.read(tmp_path)
    assert Outcome.read(tmp_path / "nothing") is None


def test_tables_against_numbers_worked_out_by_hand(tmp_path):
    found = sweep()
    runs = tmp_path / "runs"
    finish_sst2(found, runs)
    failing = cell_of(found, "MeZO", "squad").candidates[1].runs[0]
    table.write(found, tmp_path, read(found, runs), {failing.name: "it diverged"}, "zeroblock sweep trial.toml")
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert "    zeroblock sweep trial.toml" in lines
    rows = [line for line in lines if line.startswith(("| Zero-shot", "| MeZO"))]
    # 0.6, 0.7, 0.74: mean 0.68, squares .0064 + .0004 + .0036 = .0104, over 2, root .0721
    # 0.7, 0.7, 0.8: mean 0.7333, squares 2 × .001111 + .004444 = .006667, over 2, root .0577
    assert rows == [
        "| Zero-shot | 55.0 | – |",
        "| MeZO | 68.0 ± 7.2 (n=3) | – |",
        "| Zero-shot | 55.0 | – |",
        "| MeZO | 73.3 ± 5.8 (n=3) | – |",
        "| Zero-shot | nothing to choose | – |",
        "| MeZO | lr 1e-5 | – |",
    ]
    missing = lines[lines.index("## Missing") :]
    assert f"- {failing.name}: it diverged" in missing
    assert sum(line.startswith("- ") for line in missing) == 7
    assert "7 runs, 10.5 min in total." in lines


def test_csv_has_a_line_for_every_run_and_for_every_cell(tmp_path):
    found = sweep()
    finish_sst2(found, tmp_path / "runs")
    table.write(found, tmp_path, read(found, tmp_path / "runs"), {}, "")
    with (tmp_path / "runs.csv").open(newline="") as file:
        runs = list(csv.DictReader(file))
    assert len(runs) == len(found.runs) == 14
    assert [row["seed"] for row in runs if row["chosen"] == "true" and row["row"] == "MeZO"] == ["0", "1", "2"]
    one = next(row for row in runs if row["state"] == "finished" and row["lr"] == "0.0001")
    assert (one["dev"], one["test"], one["best"], one["chosen"], one["seconds"]) == (
        "0.95",
        "0.99",
        "0.99",
        "false",
        "90",
    )
    assert {row["state"] for row in runs} == {"finished", "missing"}
    with (tmp_path / "table.csv").open(newline="") as file:
        cells = {(row["row"], row["task"]): row for row in csv.DictReader(file)}
    assert len(cells) == 4
    mean = cells["MeZO", "sst2"]
    assert math.isclose(float(mean["test"]), 0.68)
    assert math.isclose(float(mean["test_std"]), math.sqrt(0.0104 / 2), rel_tol=1e-5)
    assert (mean["n"], mean["seeds"], mean["chosen"]) == ("3", "3", "lr 1e-5")
    assert cells["MeZO", "squad"]["test"] == ""


def test_sizes_are_not_results(tmp_path):
    """A sweep may vary how many rows dev has, and dev is what came out on them."""
    found = sweep(FILE + "[case.task.squad]\ndev = 100\n[case.task.sst2]\ndev = 50\n")
    table.write(found, tmp_path, read(found, tmp_path / "runs"), {}, "")
    with (tmp_path / "runs.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["row"] == "MeZO"]
    assert {(row["task"], row["set_dev"], row["dev"]) for row in rows} == {("squad", "100", ""), ("sst2", "50", "")}


def test_a_column_is_named_after_its_metric_by_whichever_row_has_one(tmp_path):
    found = sweep(FILE.replace('"Zero-shot"', '"Zero | shot"'))
    finish(tmp_path / "runs", cell_of(found, "Zero | shot", "squad").candidates[0].runs[0], 0.5, 0.5, 0.5)
    table.write(found, tmp_path, read(found, tmp_path / "runs"), {}, "")
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert "| | sst2 | squad (f1) |" in lines
    assert "| Zero \\| shot | – | 50.0 |" in lines


def test_a_part_of_the_grid_and_a_part_of_the_seeds_are_marked(tmp_path):
    found = sweep()
    low = cell_of(found, "MeZO", "squad").candidates[0]
    runs = tmp_path / "runs"
    for run in low.runs:
        finish(runs, run, 0.5, 0.4, 0.4)
    table.write(found, tmp_path, read(found, runs), {}, "")
    text = (tmp_path / "table.md").read_text()
    assert "| MeZO | – | 40.0 ± 0.0 (n=3)* |" in text
    assert "chosen among a part of the grid" in text
    assert "squad (f1)" in text
    single = sweep(FILE.replace("lr = [1e-5, 1e-4]", "lr = 1e-5"))
    runs = tmp_path / "single"
    finish(runs, cell_of(single, "MeZO", "sst2").candidates[0].runs[1], 0.5, 0.4, 0.4)
    table.write(single, tmp_path, read(single, runs), {}, "")
    assert "| MeZO | 40.0 (n=1 of 3) | – |" in (tmp_path / "table.md").read_text()
