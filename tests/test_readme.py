"""The README's commands and code run as written, and the documents name things that exist."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.main import get_command

from run_toy import save_model, single_thread  # noqa: F401 (a fixture)
from zeroblock.cli import app, main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MAX_LINES = 150
QUICK = {
    "demo": "--help",  # five minutes otherwise
    # stops at once, to be resumed; without --lr the clock would end the run
    "train": "--steps 4 --eval-every 2 --batch-size 2 --eval-limit 2 --quiet --max-minutes 1e-6 --lr 1e-3",
    "resume": "--quiet --max-minutes 10",
    "plan": "--seconds 0.1 --batch-size 2 --eval-limit 2",
}
"""What makes a command of the README quick; the last of two equal options counts."""


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for name, text in fenced if name == language]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in FOLDER, and mine.jsonl."""
    folder = tmp_path_factory.mktemp("readme")
    save_model(folder / "FOLDER")
    rows = [{"prompt": f"{n} is a word. It is", "completion": f" {'good' if n % 2 else 'bad'}"} for n in range(16)]
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_commands_run_one_after_the_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main replaces it
    lines = [line for block in blocks("") for line in block.splitlines() if line.startswith("zeroblock ")]
    assert {line.split()[1] for line in lines} >= {"demo", "train", "resume", "replay", "plan"}
    for line in lines:
        words = shlex.split(line, comments=True)
        monkeypatch.setattr(sys, "argv", [*words, *QUICK.get(words[1], "").split()])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code, line
    assert transformers.AutoModelForCausalLM.from_pretrained("tuned").num_parameters()


def test_the_python_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, trainer = blocks("python")
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"texts": ["a good word", "a bad word"]}
    exec(plain, names)
    assert names["optimizer"].steps == 2
    assert (folder / "mine" / "config.json").exists()
    assert (folder / "mine" / "tokenizer_config.json").exists()

    ids = names["tokenizer"]("a good word")["input_ids"]
    names["rows"] = [{"input_ids": ids[:length], "labels": ids[:length]} for length in (2, 3)] * 4  # padded together
    before = {name: param.clone() for name, param in names["model"].named_parameters()}
    exec(trainer.replace("max_steps=2000", "max_steps=3"), names)
    assert names["trainer"].state.global_step == 3
    assert any(not param.equal(before[name]) for name, param in names["model"].named_parameters())


def test_it_is_short_and_installs_what_there_is() -> None:
    assert len(README.splitlines()) <= MAX_LINES
    named = re.findall(r"pip install '?([\w-]+)(?:\[([\w,]+)\])?", README)
    assert named
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, wanted in named:
        assert package == "zeroblock"
        assert set(filter(None, wanted.split(","))) <= set(extras)


def test_the_options_exist() -> None:
    def options(command: Any) -> set[str]:
        own = {name for option in command.params for name in [*option.opts, *option.secondary_opts]}
        return own.union(*map(options, getattr(command, "commands", {}).values()))

    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) <= options(get_command(app))


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "examples/README.md"])
def test_the_files_and_targets_it_names_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    for path in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text):
        if not path.startswith("http"):
            assert ((ROOT / name).parent / path).exists(), path
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= targets


def test_the_parts_of_contributing_are_the_strangers() -> None:
    """What it shows is what ``test_parts.py`` runs, to the letter."""
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    stranger = (ROOT / "tests" / "stranger.py").read_text()
    assert all(block in stranger for block in shown)
    registries = re.findall(r"@(\w+)\.register", "".join(shown))
    assert sorted(registries) == ["ESTIMATORS", "RULES", "SCHEDULES", "SUBSPACES"]
