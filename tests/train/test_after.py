"""After training: the best step by default, the weights that ft keeps, runs that got worse, and the merged folder."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from loop_toy import Kill, settings
from rich.console import Console
from typer.testing import CliRunner

from toy import same, snapshot
from zeroblock.cli import app
from zeroblock.errors import ZeroBlockError
from zeroblock.report.summary import selection
from zeroblock.report.view import Lines, Quiet
from zeroblock.train import resume, run
from zeroblock.train.workload import Workload


def call(*words: object, **options: Any) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], **options)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return snapshot(transformers.AutoModelForCausalLM.from_pretrained(folder))


class Watch(Quiet):
    """Keeps the weights of every evaluation on dev."""

    def __init__(self, models: list[Any]) -> None:
        self.models, self.seen = models, {}

    def measured(self, measurement: Any) -> None:
        if measurement.split == "dev":
            self.seen[measurement.step] = snapshot(self.models[-1])


Story = tuple[Path, str]


@pytest.fixture(scope="module")
def bad(llama: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """A run that gets worse after step 2, and what it said."""
    out = tmp_path_factory.mktemp("bad") / "a run"
    base = ["--model", llama, "--task", "sst2", "--data", data, "--device", "cpu", "--batch-size", 4]
    return out, call("train", *base, "--lr", 1, "--steps", 6, "--eval-every", 2, "--out", out, color=True)


def test_the_last_line_is_a_command_that_gives_the_best_weights(bad: Story, tmp_path: Path) -> None:
    folder, said = bad
    line, command = said.rstrip().splitlines()[-2:]
    assert line == "the weights of step 2, for from_pretrained:"
    assert command.startswith("  zeroblock replay ")
    assert f"\n  {command}\n" in (folder / "summary.md").read_text()
    said = call(*shlex.split(command)[1:])
    assert "taking step 2, selected by dev loss (--step last takes the last one)" in said
    assert "after 2 steps" in said
    call("replay", folder, "--step", 2, "--out", tmp_path / "two")
    call("replay", folder, "--step", "last", "--out", tmp_path / "last")
    assert same(weights(folder / "model"), weights(tmp_path / "two"))
    assert not same(weights(folder / "model"), weights(tmp_path / "last"))
    call("export", folder, "--out", tmp_path / "best.zbj")
    assert json.loads(call("inspect", tmp_path / "best.zbj", "--json"))["steps"] == 2
    with pytest.raises(ZeroBlockError, match="--step is 'first': give best, last, or a number"):
        call("replay", folder, "--step", "first", "--out", tmp_path / "no")
    pipe = transformers.pipeline("text-generation", model=str(folder / "model"), device="cpu")
    text = pipe("1 warm", max_new_tokens=3, do_sample=False)[0]["generated_text"]
    assert text.startswith("1 warm")


def test_a_run_that_got_worse_says_so(bad: Story) -> None:
    folder, said = bad
    summary = json.loads((folder / "summary.json").read_text())
    was, now = summary["zero_shot_loss"]["dev"], summary["dev"]["loss"]
    value, before = summary["dev"]["value"], summary["zero_shot"]["dev"]
    assert now > was
    warning = next(line for line in said.splitlines() if "worse than before training" in line)
    assert "\x1b[31m" in warning
    assert f"dev loss {now:.4f}, was {was:.4f}; test accuracy " in warning
    assert "(--lr 3e-1), --clip" in warning
    assert f"> This run got worse than before training: dev loss {now:.4f}" in (folder / "summary.md").read_text()
    live = f"dev accuracy {100 * value:.1f} % (was {100 * before:.1f} %)  loss {now:.4f} (was {was:.4f})"
    assert f"step 2  {live}" in said
    assert f"loss {now:.4f}; before training {before:.1%}, loss {was:.4f}" in said


def test_without_dev_evaluations_the_last_step_is_taken_and_that_is_said(bad: Story, tmp_path: Path) -> None:
    folder, _ = bad
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "journal.zbj").write_bytes((folder / "journal.zbj").read_bytes())
    assert "was not evaluated after its first step, so the last one is taken" in call(
        "export", alone, "--out", tmp_path / "all.zbj"
    )
    assert json.loads(call("inspect", tmp_path / "all.zbj", "--json"))["steps"] == 6
    with pytest.raises(ZeroBlockError, match="no dev evaluations to select a step by: give --step last"):
        call("export", alone, "--step", "best", "--out", tmp_path / "best.zbj")
    for name in ("config.toml", "metrics.jsonl"):  # a run that has not finished
        (alone / name).write_bytes((folder / name).read_bytes())
    found = selection(alone)
    assert found is not None
    assert (found.step, found.by) == (2, "dev loss")


def test_a_resumed_run_knows_its_baseline(llama: Path, data: Path, tmp_path: Path) -> None:
    config = settings(llama, data, steps=4, eval_every=4)
    run(config, tmp_path / "run", Kill(2))
    text = io.StringIO()
    result = resume(tmp_path / "run", Lines(Console(file=text, width=200)))
    assert result.summary is not None
    for split in ("dev", "test"):
        was = result.summary["zero_shot_loss"][split]
        assert f"(was {was:.4f})" in next(line for line in text.getvalue().splitlines() if f"step 4  {split}" in line)


def test_fine_tuning_keeps_its_best_weights(llama: Path, data: Path, tmp_path: Path, models: list[Workload]) -> None:
    watch = Watch(models)
    config = settings(llama, data, method="ft", lr=0.1, steps=6, eval_every=2)
    result = run(config, tmp_path / "ft", watch)
    assert result.summary is not None
    assert result.summary["selected_step"] == 2
    assert same(weights(result.folder / "model"), watch.seen[2])
    assert not same(watch.seen[2], watch.seen[6])
    assert not list(result.folder.glob(".snapshot*"))
    assert f"    {result.folder / 'model'}" in (result.folder / "summary.md").read_text()
    assert "Copy the weights of step 2, which dev selected" in (result.folder / "report.html").read_text()
    said = call("replay", result.folder, "--out", tmp_path / "copy")
    assert f"of step 2; they are in {result.folder / 'model'} too" in said
    assert same(weights(tmp_path / "copy"), watch.seen[2])
    assert "tuned on sst2" in (tmp_path / "copy" / "README.md").read_text()
    for step in ("last", 4):
        with pytest.raises(ZeroBlockError, match="only the weights of step 2"):
            call("replay", result.folder, "--step", step, "--out", tmp_path / "no")
    with pytest.raises(ZeroBlockError, match="ft keeps no journal to export: its weights are in"):
        call("export", result.folder, "--out", tmp_path / "no.zbj")
    run(config.replace(save_weights=False, steps=2), tmp_path / "none")
    with pytest.raises(ZeroBlockError, match="a run of ft without weights"):
        call("replay", tmp_path / "none", "--out", tmp_path / "no")
    (tmp_path / "mine" / "model").mkdir(parents=True)
    with pytest.raises(ZeroBlockError, match="exists and is not this run's"):
        run(config, tmp_path / "mine")
