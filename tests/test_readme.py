"""The README's code runs as written, and the documents name things that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from toy import PATIENCE_S
from zeroblock.method import METHODS
from zeroblock.task import Encoded

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_python_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
    )

    def fresh() -> torch.nn.Module:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)

    model = fresh()
    tokens = torch.arange(3, 21).view(2, 9)
    batch = {"input_ids": tokens, "labels": tokens}
    names = {
        "torch": torch, "model": model, "batch": batch, "base_model": fresh(), "a": tokens[:1], "b": tokens[1:],
        "objective": lambda x: model(input_ids=x, labels=x).loss, "closure": lambda: model(**batch).loss,
        "encoded": [Encoded((3, 4, 5), ((6,), (7, 8)))], "labels": [1],
        "accuracy": lambda m: float((m(tokens).logits.argmax(-1) == tokens).float().mean()),
    }  # fmt: skip
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 3
    import zeroblock as zb

    for block in blocks:
        if "records = []" in block:  # a replay starts where its run did
            names["optimizer"] = zb.mezo_bcd(names["model"], lr=1e-5)
            block, _, tail = block.partition("records = []")
            exec(block, names)
            names["model"] = model = fresh()
            names["optimizer"] = zb.mezo_bcd(model, lr=1e-5)
            exec("records = []" + tail, names)
            assert torch.equal(model.lm_head.weight, names["base_model"].lm_head.weight)
        else:
            exec(block, names)


def test_the_commands_of_the_readme_exist() -> None:
    section = README.partition("## Commands")[2].partition("##")[0]
    commands = {line.split()[1] for line in section.splitlines() if line.startswith("zeroblock ")}
    assert len(commands) >= 5
    for command in commands:
        call = [sys.executable, "-c", "from zeroblock.cli import main; main()", command, "--help"]
        assert subprocess.run(call, capture_output=True, timeout=PATIENCE_S).returncode == 0, command


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "examples/README.md"])
def test_the_files_and_targets_it_names_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    for path in re.findall(r"\]\(([^)#]+)\)", text):
        if not path.startswith("http"):
            assert (ROOT / path).exists(), path
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= targets


def test_the_table_of_methods_names_them_all() -> None:
    table = README.partition("| method | partition |")[2].partition("\n\n")[0]
    names = [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(names) == sorted(METHODS)


def test_the_parts_of_contributing_are_the_strangers() -> None:
    """What it shows is what ``test_parts.py`` runs, to the letter."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    stranger = (ROOT / "tests" / "stranger.py").read_text()
    assert all(block in stranger for block in blocks)
    shown = re.findall(r"@(\w+)\.register", "".join(blocks))
    assert sorted(shown) == ["ESTIMATORS", "RULES", "SCHEDULES", "SUBSPACES"]
