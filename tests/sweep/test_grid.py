"""Sweep files: what they expand to, and what is wrong with bad ones."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from zeroblock.cli import sweep as cli
from zeroblock.errors import ZeroBlockError, ZeroBlockWarning
from zeroblock.sweep.grid import parse
from zeroblock.sweep.outcome import waiting
from zeroblock.sweep.plan import Sweep

SWEEPS = Path(__file__).parents[2] / "sweeps"


def sweep(text: str, **overrides: object) -> Sweep:
    return Sweep.of("test", tomllib.loads(text), overrides)


PLAIN = """
[run]
model = "smollm2"
[grid]
method = ["mezo", "mezo_bcd"]
lr = [1e-5, 1e-4]
task = ["sst2", "rte"]
seed = [0, 1, 2]
"""

CASES = """
tune = ["lr", "rank"]
[run]
model = "smollm2"
steps = 100
[grid]
task = ["sst2", "squad"]
seed = [0, 1]
[task.squad]
steps = 50
[[case]]
name = "zero"
method = "zero-shot"
seed = 0
[[case]]
name = "LOZO"
method = "lozo"
lr = [1e-6, 1e-7]
rank = [1, 2, 4]
[[case]]
name = "FT"
method = "ft"
lr = 1e-5
steps = 30
[case.task.squad]
steps = 20
"""


@pytest.mark.parametrize("lr", ["", "lr = 1e-3\n"])
def test_minutes_make_another_run_if_they_decide_what_it_learns(lr: str) -> None:
    """Without a learning rate they are the length of the run; else a run that they stop is continued."""
    text = '[run]\nmodel = "m"\ntask = "sst2"\nmethod = "mezo_bcd"\n' + lr
    short, long = (next(iter(sweep(f"{text}max_minutes = {minutes}\n").runs)) for minutes in (1.0, 5.0))
    assert (short == long) == bool(lr)


def test_a_plain_grid_makes_a_row_of_every_choice_and_averages_seeds():
    found = sweep(PLAIN)
    assert found.rows == [f"method {m}, lr {lr}" for m in ("mezo", "mezo_bcd") for lr in ("1e-5", "1e-4")]
    assert found.tasks == ["sst2", "rte"]
    assert len(found.runs) == 2 * 2 * 2 * 3
    assert all(not cell.tuned and len(cell.candidates[0].runs) == 3 for cell in found.cells)
    assert [cell.task for cell in found.cells] == ["sst2"] * 4 + ["rte"] * 4  # the first column is whole first


def test_tuned_fields_are_candidates_of_one_row():
    found = sweep('tune = ["lr"]\n' + PLAIN)
    assert found.rows == ["method mezo", "method mezo_bcd"]
    cell = found.cells[0]
    assert [dict(c.values) for c in cell.candidates] == [{"lr": 1e-5}, {"lr": 1e-4}]
    assert [run.config.seed for run in cell.candidates[1].runs] == [0, 1, 2]
    assert cell.voters == 3
    assert waiting(found, {}) == 0


def test_cases_make_rows_and_the_particular_wins():
    found = sweep(CASES)
    assert found.rows == ["zero", "LOZO", "FT"]
    assert [len(cell.candidates) for cell in found.cells] == [1, 6, 1, 1, 6, 1]
    assert len(found.runs) == 2 * (1 + 6 * 2 + 2)
    steps = {(cell.row, cell.task): cell.candidates[0].runs[0].config.steps for cell in found.cells}
    assert steps == {
        ("zero", "sst2"): 100,
        ("zero", "squad"): 50,
        ("LOZO", "sst2"): 100,
        ("LOZO", "squad"): 50,
        ("FT", "sst2"): 30,
        ("FT", "squad"): 20,
    }


def test_a_task_may_have_seeds_of_its_own_and_a_case_tasks_of_its_own():
    found = sweep(
        CASES.replace("[task.squad]", "[task.squad]\nseed = [7]")
        .replace("lr = 1e-5", 'lr = 1e-5\ntask = "sst2"')
        .replace("[case.task.squad]\nsteps = 20", "")
    )
    seeds = {(cell.row, cell.task): [r.config.seed for r in cell.candidates[0].runs] for cell in found.cells}
    assert seeds == {
        ("zero", "sst2"): [0],
        ("zero", "squad"): [0],
        ("LOZO", "sst2"): [0, 1],
        ("LOZO", "squad"): [7],
        ("FT", "sst2"): [0, 1],
    }


def test_fewer_tuning_seeds_leave_the_others_for_later():
    found = sweep("tune_seeds = 1\n" + CASES)
    lozo = next(cell for cell in found.cells if cell.row == "LOZO")
    assert lozo.voters == 1
    assert len(list(lozo.tuning())) == 6
    free = next(cell for cell in found.cells if cell.row == "FT")
    assert len(list(free.tuning())) == 2  # nothing to choose, nothing to wait for
    assert waiting(found, {}) == 2


def test_follow_ties_one_field_to_another():
    found = sweep(PLAIN + '\n[follow]\ndata_seed = "seed"\n')
    assert all(run.config.data_seed == run.config.seed for run in found.runs.values())
    assert {run.config.seed for run in found.runs.values()} == {0, 1, 2}


def test_a_field_that_stands_further_down_does_not_follow():
    found = sweep(PLAIN + '\n[follow]\ndata_seed = "seed"\n[task.rte]\ndata_seed = 5\n')
    for run in found.runs.values():
        assert run.config.data_seed == (5 if run.config.task == "rte" else run.config.seed)


def test_overrides_win_over_everything():
    found = sweep(CASES, steps=7, task=["squad"], seed=5)
    assert found.tasks == ["squad"]
    assert {(run.config.steps, run.config.seed) for run in found.runs.values()} == {(7, 5)}
    assert parse(["lr=[1e-3, 1e-4]", "data=a b", "graphs=off", "calibrate=true"]) == {
        "lr": [1e-3, 1e-4],
        "data": "a b",
        "graphs": "off",
        "calibrate": True,
    }


def test_names_read_well_and_tell_runs_apart():
    found = sweep(CASES)
    names = list(found.runs)
    assert names[1].startswith("sst2-lozo-lr1e-6-rank1-seed0-")
    assert names[0].startswith("sst2-zero-shot-seed0-")
    assert len({run.digest for run in found.runs.values()}) == len(names)


def test_a_run_is_known_when_the_sweep_grows_or_its_data_move():
    digests = {
        (run.config.method, run.config.task, run.config.lr, run.config.rank, run.config.seed): run.digest
        for run in sweep(CASES).runs.values()
    }
    grown = sweep(
        CASES.replace('"squad"]', '"squad", "rte"]').replace("rank = [1", "interval = [50, 10]\nrank = [8, 1"),
        data="elsewhere",
    )
    kept = {
        (run.config.method, run.config.task, run.config.lr, run.config.rank, run.config.seed): run.digest
        for run in grown.runs.values()
        if run.config.interval is None
    }
    assert {key: kept[key] for key in digests if key in kept} == {key: digests[key] for key in digests if key in kept}
    assert sum(key in kept for key in digests) == 6
    changed = sweep(CASES, steps=99)
    assert not {run.digest for run in changed.runs.values()} & set(digests.values())  # other steps, another run


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[run]\nmodell = 'm'", "unknown field in [run]: 'modell'; did you mean 'model'?"),
        ("runs = 1", "unknown key 'runs'; did you mean 'run'?"),
        ("[[case]]\nname = 'a'\nlearning = 1", "unknown field in [[case]] 'a': 'learning'"),
        (PLAIN + "[task.sst]\nsteps = 3", "unknown task in a task table: 'sst'; did you mean 'sst2'?"),
        ("[run]\nlr = [1e-3]", "[run] lr has several values: put it under [grid]"),
        ("[grid]\nlr = 1e-3", "[grid] lr is one value"),
        ("tune = ['lrr']", "unknown field in tune: 'lrr'; did you mean 'lr'?"),
        ("tune = ['seed']", "tune cannot hold 'seed'"),
        ("tune_seeds = 0", "tune_seeds is a number of seeds"),
        ("[run]\nmodel = 'm'", "no task"),
        (PLAIN.replace("[1e-5, 1e-4]", "[]"), "lr = [] is empty"),
        (PLAIN.replace("[1e-5, 1e-4]", "[1e-5, 1e-5]"), "has a value twice"),
        (PLAIN.replace("1e-4]", "'high']"), "task sst2: lr is 'high', expected float"),
        (CASES.replace("lr = 1e-5", ""), "case 'FT', task sst2: ft needs a learning rate"),
        (CASES.replace('"FT"', '"LOZO"'), "two cases are named 'LOZO'"),
        (PLAIN.replace("[1e-5, 1e-4]", "[2024-01-01]"), "holds a value that is neither text nor number"),
        (PLAIN.replace("sst2", "sst3"), "unknown task 'sst3'; did you mean 'sst2'?"),
        ("[grid]\ntask = [['sst2']]", "is not a task's name"),
        ("tune = [['lr']]", "tune is a list of fields"),
        ("case = 3", "cases are written as [[case]] tables"),
        ("task = 'sst2'", "task is a table for every task"),
        ("[follow]\ndata_seed = 'sed'", "unknown field in [follow]: 'sed'; did you mean 'seed'?"),
    ],
)
def test_mistakes_are_named_before_anything_runs(text, says):
    with pytest.raises(ZeroBlockError) as error:
        sweep(text)
    assert says in str(error.value)


def test_a_file_that_is_no_toml_is_named(tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text("tune = [")
    with pytest.raises(ZeroBlockError, match=r"bad\.toml: "):
        Sweep.load(file)
    with pytest.raises(ZeroBlockError, match="cannot read the sweep file"):
        Sweep.load(tmp_path / "none.toml")


ELEVEN, SEEDS = 11, 3
COUNTS = {
    # zero-shot, ICL, MeZO lr, LOZO lr × rank, MeZO-BCD lr × order, FT lr
    "opt-13b": ELEVEN * (1 + 1 + 2 + 2 * 3 + 2 * 2 + 3),
    "three-seeds": 4 * SEEDS * (2 + 2 * 3 + 2 * 2),
    "partitions": 3 * (3 + 2 + 3),
    "orders": 3 * 4 * 2,
    "adaptive": SEEDS * 3,
    "adam": 5 * SEEDS * (2 + 2),
    # zero-shot, ICL, seven cases of two learning rates, whose choice of sst2 has a second seed
    "smollm2": 6 * (1 + 1 + 7 * 2) + 7,
    "icl": ELEVEN * SEEDS,
}
PAPER = [name for name in COUNTS if name not in ("smollm2", "icl")]


@pytest.mark.parametrize("name", PAPER)
def test_the_sweeps_of_the_paper_have_its_grids(name):
    found = Sweep.load(SWEEPS / f"{name}.toml")
    assert len(found.runs) == COUNTS[name]
    assert {(run.config.batch_size, run.config.eps) for run in found.runs.values() if run.config.method != "ft"} == {
        (16, 1e-3)
    }
    trained = [run.config for run in found.runs.values() if run.config.trains and run.config.method != "ft"]
    assert {config.evaluations for config in trained} == {(0, 4000, 8000, 12000, 16000, 20000)}
    seeds = {(run.config.seed, run.config.data_seed) for run in found.runs.values()}
    assert seeds == ({(0, 0), (42, 42), (100, 100)} if name in ("three-seeds", "adaptive", "adam") else {(0, 0)})


def test_the_sweep_of_the_small_model_has_every_row_and_two_seeds_of_sst2():
    found = Sweep.load(SWEEPS / "smollm2.toml", {"data": "somewhere"})
    assert len(found.rows) == 9
    assert found.tasks == ["sst2", "rte", "boolq", "wic", "copa", "squad"]
    tuning = sum(len(list(cell.tuning())) for cell in found.cells)
    assert (tuning, waiting(found, {})) == (6 * (2 + 7 * 2), 7)
    assert all(run.config.data == "somewhere" for run in found.runs.values())


@pytest.mark.parametrize("file", sorted(SWEEPS.glob("*.toml")), ids=lambda file: file.stem)
def test_every_sweep_file_lists_its_runs(file, tmp_path):
    app = typer.Typer()
    app.command()(cli.sweep)
    out = str(tmp_path / "out")
    result = CliRunner().invoke(app, [str(file), "--out", out, "--dry-run", "--json", "--data", "somewhere"])
    assert result.exit_code == 0, result.output
    listed = [json.loads(line) for line in result.stdout.splitlines()]
    later = waiting(Sweep.load(file), {})
    assert sum(run["state"] == "due" for run in listed) + later == COUNTS[file.stem]
    assert not (tmp_path / "out").exists()
    head = file.read_text().partition("\n\n")[0].splitlines()
    assert head[0].startswith(f"# zeroblock sweep sweeps/{file.name}")
    assert f" {COUNTS[file.stem]} runs." in " ".join(head)
    plain = CliRunner().invoke(app, [str(file), "--out", out, "--dry-run"]).stdout.splitlines()
    assert f"0 runs finished, {COUNTS[file.stem] - later} due" in plain[-1]
    assert len(plain) == COUNTS[file.stem] - later + 1


OLD = """
tune = ["order", "schedule"]
[run]
model = "m"
task = "sst2"
method = "mezo_bcd"
lr = 1e-3
[[case]]
name = "a"
order = ["random", "flip-flop"]
schedule = ["linear", "cosine"]
"""


def test_names_of_0_1_are_accepted() -> None:
    """In tables, in tune, and on the command line."""
    new = OLD.replace("schedule", "lr_schedule").replace("order", "schedule")
    with pytest.warns(ZeroBlockWarning, match=r"no longer (order|schedule)"):
        old = sweep(OLD)
    assert list(old.runs) == list(sweep(new).runs)
    assert set(old.varied) == {"schedule", "lr_schedule"}
    with pytest.warns(ZeroBlockWarning, match="no longer order"):
        assert len(sweep(new, order="random").runs) == 2


def test_a_field_that_follows_another_has_no_values_of_its_own() -> None:
    """They would be overwritten, and the same run would count several times in a mean."""
    text = OLD.partition("[[case]]")[0].replace('tune = ["order", "schedule"]', "")
    text += '[grid]\nseed = [0, 1]\ndata_seed = [0, 1]\n[follow]\ndata_seed = "seed"\n'
    with pytest.raises(ZeroBlockError, match=r"\[follow\] data_seed takes the value of seed: leave it out of \[grid\]"):
        sweep(text)
    assert len(sweep(text.replace("data_seed = [0, 1]\n", "")).runs) == 2


def test_a_sweep_file_cannot_ask_for_code() -> None:
    text = OLD.partition("[[case]]")[0].replace('tune = ["order", "schedule"]', "") + "trust_remote_code = true\n"
    with pytest.warns(ZeroBlockWarning, match=r"trust_remote_code = true is ignored .*--set trust_remote_code=true"):
        (run,) = sweep(text).runs.values()
    assert not run.config.trust_remote_code
    with pytest.warns(ZeroBlockWarning, match="is ignored"):
        (run,) = sweep(text, trust_remote_code=True).runs.values()
    assert run.config.trust_remote_code
