"""After training an adapter: what is said of it, what is pushed, and what others can load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from loop_toy import settings
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import zeroblock as zb
from toy import same, snapshot
from zeroblock.adapter import Prefix
from zeroblock.cli import app
from zeroblock.errors import ZeroBlockError
from zeroblock.forecast import forecast
from zeroblock.sweep.grid import Grid
from zeroblock.train import run

LORA = "r=3,targets=q,v"


def call(*words: object) -> str:
    return CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False).output


@pytest.fixture(scope="module")
def tuned(llama: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run with LoRA, and what it said."""
    out = tmp_path_factory.mktemp("tuned") / "run"
    base = ["--model", llama, "--task", "sst2", "--data", data, "--device", "cpu", "--batch-size", 4, "--lora", LORA]
    return out, call("train", *base, "--lr", 1e-2, "--steps", 4, "--eval-every", 2, "--out", out)


def test_a_run_says_where_its_adapter_is_and_what_loads_it(tuned: tuple[Path, str], tmp_path: Path) -> None:
    folder, said = tuned
    step = json.loads((folder / "summary.json").read_text())["selected_step"]
    assert said.endswith(f"the adapter of step {step}, for PeftModel.from_pretrained:\n  {folder / 'adapter'}\n")
    assert f"for PeftModel.from_pretrained:\n\n    {folder / 'adapter'}\n" in (folder / "summary.md").read_text()
    said = call("replay", folder, "--out", tmp_path / "out")
    assert f'PeftModel.from_pretrained(base, "{tmp_path / "out"}")' in said


@pytest.mark.parametrize("source", ["run", "replayed", "adapter"])
def test_a_pushed_adapter_names_its_base_without_folders(
    tuned: tuple[Path, str], llama: Path, tmp_path: Path, source: str
) -> None:
    folder, _ = tuned
    given = {"run": folder, "replayed": tmp_path / "replayed", "adapter": folder / "adapter"}[source]
    if source == "replayed":
        call("replay", folder, "--out", given)
    said = call("push", given, "ann/tuned", "--dry-run", tmp_path / "sent")
    assert f"names the base {llama.name!r}, which is not a repository" in said
    texts = [file.read_text() for file in (tmp_path / "sent").iterdir() if file.suffix in (".json", ".md")]
    assert str(llama.parent) not in "".join(texts)
    assert json.loads((tmp_path / "sent" / "adapter_config.json").read_text())["base_model_name_or_path"] == llama.name
    base = transformers.AutoModelForCausalLM.from_pretrained(llama)
    assert peft.PeftModel.from_pretrained(base, tmp_path / "sent").peft_config["default"].r == 3
    if source == "adapter":
        return
    card = (tmp_path / "sent" / "README.md").read_text()
    assert "library_name: peft\n" in card
    assert "base_model_relation: adapter\n" in card
    assert 'model = PeftModel.from_pretrained(base, "ann/tuned")' in card
    assert f"vllm serve {llama.name} --enable-lora --lora-modules tuned=ann/tuned" in card


def test_the_cards_of_its_journal_show_what_works(tuned: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = tuned
    call("push", folder, "ann/tuned", "--what", "journal", "--dry-run", tmp_path / "sent")
    card = (tmp_path / "sent" / "README.md").read_text()
    assert 'model = zb.load("ann/tuned")' in card
    assert "zb.load(model" not in card, "which would need the very adapter that the run began with"
    assert 'model = zb.load("FILE.zbj")' in call("inspect", tmp_path / "sent" / "journal.zbj")
    assert isinstance(zb.load(folder), peft.PeftModel)


def test_load_takes_the_kept_start_of_a_prefix(llama: Path, data: Path, tmp_path: Path) -> None:
    config = settings(llama, data, prefix=2, eps=0.1, steps=2, eval_every=2, eval_limit=4)
    with pytest.warns(zb.errors.ZeroBlockWarning, match="padded rows"):
        folder = run(config, tmp_path / "run").folder
    zb.load(folder)
    file = folder / "start" / "adapter_model.safetensors"
    save_file({name: torch.zeros_like(one) for name, one in load_file(file).items()}, file)
    with pytest.raises(ZeroBlockError, match="weights"):
        zb.load(folder)


def test_plan_counts_what_an_adapter_trains(llama: Path, data: Path) -> None:
    def extra(**changes: Any) -> tuple[int, int]:
        found = {one.method: one.cpu for one in forecast(settings(llama, data, **changes), 0.1).memory}
        return found["mezo_adam"] - found["mezo"], found["ft"]

    adapter, whole = extra(lora=LORA), extra()
    sizes = {"q": 32 + 32, "v": 32 + 16}  # inputs and outputs; two key-value heads of eight
    assert adapter[0] == 2 * 4 * 2 * 3 * sum(sizes.values()), "two moments of four bytes in two layers of rank 3"
    assert whole[0] > 10 * adapter[0]
    assert whole[1] > adapter[1]


def test_sweeps_keep_no_weights_of_ft_unless_told(llama: Path) -> None:
    file = {"run": {"model": str(llama), "lr": 1e-4, "method": "ft"}, "grid": {"task": ["sst2"]}}
    kept = [Grid.of(file, own).cells()[0].candidates[0][1][0].save_weights for own in ({}, {"save_weights": True})]
    assert kept == [False, True]


def test_a_run_that_only_measured_has_nothing_to_replay(llama: Path, data: Path, tmp_path: Path) -> None:
    run(settings(llama, data, method="zero-shot", lr=None, eval_limit=4), tmp_path / "zero")
    for words in (["replay"], ["export"], ["push"]):
        target = ["ann/x", "--dry-run", tmp_path / "x"] if words == ["push"] else ["--out", tmp_path / "x"]
        with pytest.raises(ZeroBlockError, match="a run of zero-shot, which measures a model and does not change it"):
            call(*words, tmp_path / "zero", *target)


def test_peft_loads_what_it_saved_into_a_prefix_cut_by_layer(llama: Path, tmp_path: Path) -> None:
    """As the Trainer does when it resumes."""
    model: Any = Prefix(2).attach(transformers.AutoModelForCausalLM.from_pretrained(llama))
    start = snapshot(model)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        for param in model.parameters():
            param += param.requires_grad
    assert not same(snapshot(model), start)
    model.load_adapter(tmp_path, "default", is_trainable=True)
    assert same(snapshot(model), start)
