"""The command line as a newcomer meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from toy import PATIENCE_S, zeroblock
from zeroblock.cli import app
from zeroblock.cli.methods import TABLE, describe_all
from zeroblock.method import METHODS

COMMAND = [sys.executable, "-m", "zeroblock"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])


@pytest.mark.parametrize(("argument", "answer"), [("--help", "one block at a time"), ("methods", "mezo_bcd_adam")])
def test_a_plain_question_needs_no_torch(argument: str, answer: str) -> None:
    """The interpreter itself says what answering has imported."""
    script = (
        "import sys, zeroblock.cli as cli\n"
        f"sys.argv = ['zeroblock', {argument!r}]\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numba', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "print('IMPORTED', sorted(heavy))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S).stdout
    assert answer in out
    assert out.rstrip().endswith("IMPORTED []")


@pytest.mark.parametrize(
    "command",
    [
        "demo",
        "train",
        "eval",
        "resume",
        "sweep",
        "replay",
        "inspect",
        "export",
        "apply",
        "push",
        "methods",
        "blocks",
        "schedule",
        "tasks",
        "bench",
        "lab",
    ],
)
def test_every_subcommand_has_help(command: str) -> None:
    result = zeroblock(command, "--help")
    assert result.returncode == 0
    assert re.search(rf"Usage: .*\bzeroblock {command} ", result.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["blok"], "No such command 'blok'"),
        (["blocks"], "--model"),
        (["blocks", "--model", "opt-1.3c"], "unknown model 'opt-1.3c'; did you mean 'opt-1.3b'?"),
        (["blocks", "--model", "./nowhere"], "no folder './nowhere'"),
        (
            ["blocks", "--model", "opt-125m", "--partition", "layrs"],
            "unknown partition 'layrs'; did you mean 'layers'?",
        ),
        (["blocks", "--model", "opt-125m", "--partition", "layers:0"], "from 1 on, as in layers:2"),
        (["blocks", "--model", "opt-125m", "--partition", "whole:2"], "only layers takes a number"),
        (["blocks", "--model", "tests"], "no config.json"),
        (["schedule", "--seed", str(1 << 64)], "less than or equal to"),
        (["tasks", "show", "README.md"], "cannot tell what README.md is"),
        (["bench", "plot", "--csv", "results/bench.csv", "--out", "README.md"], "README.md: File exists"),
        (["bench", "plot", "--csv", "docs/bench_time.png", "--out", "docs"], "not UTF-8"),
        (["train", "--config", "README.md"], "README.md: invalid TOML"),
        (["train", "--model", "smollm2", "--task", "sst2", "--lr", "1", "--track", "wand"], "did you mean 'wandb'?"),
        (["eval", "--model", "opt-125m", "--task", "sst2", "--device", "mps"], "choose auto, cpu, cuda or cuda:N"),
        (["sweep", "docs/bench_time.png"], "not UTF-8"),
        (["schedule", "--schedule", "flipflop"], "did you mean 'flip-flop'?"),
        (["schedule", "--schedule", "random", "--order", "random"], "leave --order out"),
        (["schedule", "--blocks", "0"], "greater than or equal to 1"),
        (["schedule", "--turns", "many"], "valid integer"),
        (["schedule", "--colour"], "--colour"),
        (["train", "--learning-rate", "1"], "No such option: --learning-rate; here it is --lr (see"),
        (["methods", "mezo_bdc"], "unknown method 'mezo_bdc'; did you mean 'mezo_bcd'?"),
    ],
    ids=" ".join,
)
def test_mistakes_get_one_line(arguments: list[str], message: str) -> None:
    check_mistake(zeroblock(*arguments), message)


def check_mistake(result: subprocess.CompletedProcess[str], message: str) -> None:
    assert result.returncode == 2
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("zeroblock: ")
    assert message in lines[0]


def test_a_process_of_its_own_answers_in_the_same_way() -> None:
    """The mistake of an argument, and one that is found later: exit status and streams as the shell sees them."""
    for arguments, message in ((["blok"], "No such command 'blok'"), (["methods", "mezo_bdc"], "did you mean")):
        done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=PATIENCE_S)
        check_mistake(done, message)


def test_schedule() -> None:
    result = zeroblock("schedule", "--schedule", "flip-flop", "--blocks", "5", "--turns", "20")
    assert result.stdout == "0 1 2 3 4 3 2 1 0 1 2 3 4 3 2 1 0 1 2 3\n"
    shuffled = json.loads(zeroblock("schedule", "--blocks", "4", "--turns", "8", "--seed", "3", "--json").stdout)
    assert sorted(shuffled[:4]) == sorted(shuffled[4:]) == [0, 1, 2, 3]


def test_the_schedule_has_the_names_that_train_accepts() -> None:
    """And its flag of 0.1 still works, with one warning."""
    shuffled, random, default = (
        zeroblock("schedule", *option).stdout for option in (("--schedule", "shuffled"), ("--schedule", "random"), ())
    )
    assert shuffled == random == default
    old = zeroblock("schedule", "--order", "descending", "--turns", "3")
    assert old.stdout == "4 3 2\n"
    assert old.stderr == "zeroblock: warning: --order is now called --schedule; the old name works until 0.3\n"
    text = zeroblock("schedule", "--help").stdout
    assert "--order" not in text
    assert "random" in text


def test_blocks_as_json() -> None:
    answer = json.loads(zeroblock("blocks", "--model", "opt-1.3b", "--partition", "layers", "--json").stdout)
    assert (answer["model"], answer["partition"], answer["n"]) == ("opt-1.3b", "layers", 27)
    assert answer["blocks"][2] == {"name": "model.decoder.layers.0", "tensors": 16, "numel": 50358272}
    assert sum(b["numel"] for b in answer["blocks"]) == 1_315_758_080


def test_blocks_of_a_local_folder(tmp_path: Path) -> None:
    import transformers

    transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
    ).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({**json.loads((tmp_path / "config.json").read_text()), "architectures": ["LlamaForCausalLM"]})
    )
    answer = json.loads(zeroblock("blocks", "--model", str(tmp_path), "--partition", "layers:2", "--json").stdout)
    assert [b["name"] for b in answer["blocks"]] == [
        "model.embed_tokens", "model.layers.0-1", "model.layers.2", "model.norm", "lm_head",
    ]  # fmt: skip
    assert "5 blocks" in zeroblock("blocks", "--model", str(tmp_path), "--partition", "layers:2").stdout


def test_methods() -> None:
    rows = json.loads(zeroblock("methods", "--json").stdout)
    assert [row["name"] for row in rows] == list(METHODS)
    assert all(set(row) >= {"name", "parts", "defaults", "citation"} for row in rows)
    table = zeroblock("methods").stdout
    assert all(name in table for name in METHODS)
    assert "Malladi" in zeroblock("methods", "mezo").stdout


def test_the_table_of_methods_is_up_to_date() -> None:
    assert json.loads(TABLE.read_text(encoding="utf-8")) == describe_all(), "bring it up to date with: make methods"


def test_a_pipe_that_closes_is_no_error() -> None:
    script = "from zeroblock.cli import main; main()"
    # more than the 64 KiB that a pipe holds, so that the command is still writing when its reader ends
    command = f"{sys.executable} -c '{script}' schedule --schedule ascending --turns 100000 | head -c 10"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.stderr == ""
    assert len(result.stdout) == 10


def test_no_help_shows_a_type_beside_a_flag() -> None:
    def commands(command: Any, words: list[str]) -> Iterator[list[str]]:
        yield words
        for name, one in getattr(command, "commands", {}).items():
            yield from commands(one, [*words, name])

    for words in commands(get_command(app), []):
        shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "160"})
        assert shown.exit_code == 0, words
        assert "<bool>" not in shown.output, words
        assert "--help" in shown.output
