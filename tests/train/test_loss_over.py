"""The loss of answers: averaged over all tokens of a batch, as published, or first within each example."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

import pytest
from loop_toy import Kill, kept, settings

from zeroblock.journal import read
from zeroblock.sweep.plan import Sweep
from zeroblock.train import Config, resume, run
from zeroblock.train.config import recorded
from zeroblock.train.workload import prepare, resolve

Over = Literal["tokens", "examples"]


def generating(llama: Path, data: Path, **changes: Any) -> Config:
    base = {"steps": 4, "eval_every": 4, "eval_limit": 4, "batch_size": 4, "eval_start": False}
    return resolve(settings(llama, data, task="squad", **{**base, **changes}))


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """Completions of one token and of many, where the two means differ."""
    file = tmp_path / "own.jsonl"
    rows = [f'{{"prompt": "{i}:", "completion": " {"y" * (1 + 20 * (i % 3))}"}}\n' for i in range(60)]
    file.write_text("".join(rows))
    return file


def expected(scores: list[Any], over: Over) -> float:
    answers = [score for (score,) in scores]
    if over == "tokens":
        return -sum(one.total for one in answers) / sum(one.tokens for one in answers)
    return -sum(one.mean for one in answers) / len(answers)


@pytest.mark.parametrize("over", ["tokens", "examples"])
def test_both_ways_by_name(over: Over, llama: Path, uneven: Path) -> None:
    config = resolve(settings(llama, uneven, task=str(uneven), loss_over=over).replace(data=None, eval_limit=9))
    workload = prepare(config)
    batch = range(4)
    scores = workload.engine.scores([workload.train[i][0] for i in batch])
    (objective,) = workload.objectives(batch)
    assert float(objective()) == pytest.approx(expected(scores, over), rel=1e-5)
    exam = workload.exams["dev"]
    found = workload.evaluator(exam).loss
    assert found == pytest.approx(expected(workload.engine.scores(exam.scored), over), rel=1e-5)
    other = expected(scores, "examples" if over == "tokens" else "tokens")
    assert abs(other - expected(scores, over)) > 1e-3


@pytest.mark.parametrize("method", ["mezo_bcd", "ft"])
@pytest.mark.parametrize("over", ["tokens", "examples"])
def test_micro_batches_add_up(over: Over, method: str, llama: Path, uneven: Path, tmp_path: Path) -> None:
    config = settings(llama, uneven, task=str(uneven), method=method, loss_over=over, steps=3, eval_every=3)
    config = config.replace(data=None, eval_limit=2, eval_start=False)
    one = run(config.replace(batch_size=6), tmp_path / "one")
    two = run(config.replace(batch_size=2, accumulate=3), tmp_path / "two")
    tables = [(r.folder / "steps.csv").read_text().splitlines()[1:] for r in (one, two)]
    a, b = ([float(line.split(",")[2]) for line in table] for table in tables)
    assert a == pytest.approx(b, rel=1e-4)


def test_the_default_is_the_published_one(llama: Path, data: Path) -> None:
    assert generating(llama, data).loss_over == "tokens"
    assert resolve(settings(llama, data)).loss_over is None  # sst2 trains on its options
    workload = prepare(resolve(settings(llama, data, loss_over="tokens")))
    assert any("loss_over has no effect: sst2" in note for note in workload.notes)


def test_a_run_of_0_1_is_resumed_as_it_began(llama: Path, data: Path, tmp_path: Path) -> None:
    """Its configuration does not say, and it averaged over examples."""
    config = generating(llama, data, loss_over="examples")
    whole = run(config, tmp_path / "whole")
    run(config, tmp_path / "run", Kill(2))
    file = tmp_path / "run" / "config.toml"
    assert recorded(file).loss_over == "examples"
    file.write_text(file.read_text().replace('loss_over = "examples"\n', ""))
    assert recorded(file).loss_over == "examples"
    resume(tmp_path / "run")
    assert kept(whole.folder) == kept(tmp_path / "run")
    other = run(config.replace(loss_over="tokens"), tmp_path / "tokens")
    assert read(other.folder).records[0].loss != read(whole.folder).records[0].loss


SWEEP = """
[run]
model = "m"
steps = 100
lr = 1e-3
method = "mezo_bcd"
schedule = "flip-flop"
lr_schedule = "linear"
[grid]
task = ["sst2", "squad"]
"""


def test_a_sweep_knows_its_runs_of_0_1() -> None:
    """By the digest in their folders' names; those of answers were of another loss, unless asked for."""

    def digests(**changes: str) -> list[str]:
        return [run.digest for run in Sweep.of("test", tomllib.loads(SWEEP), changes).runs.values()]

    sst2, squad = "99da5970", "cf60886a"  # as 0.1.0 named them
    assert digests()[0] == sst2
    assert digests()[1] != squad
    assert digests(loss_over="examples") == [sst2, squad]
