"""The wheel in an environment of its own, without extras: what a user gets from ``pip install``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toy import PATIENCE_S
from zeroblock import __version__

pytestmark = pytest.mark.wheel
ROOT = Path(__file__).parents[2]
MODEL = """
import sys, tokenizers, transformers
from tokenizers import decoders, models, pre_tokenizers

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
inner = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(["</s>", *alphabet])}, []))
inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
words = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="</s>", eos_token="</s>")
words.save_pretrained(sys.argv[1])
config = transformers.LlamaConfig(
    vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    bos_token_id=0, eos_token_id=0,
)
transformers.LlamaForCausalLM(config).save_pretrained(sys.argv[1])
"""
"""A byte-level tokenizer and a random Llama of two layers, from the packages that the wheel brings along."""


class Environment:
    """A fresh virtual environment with the wheel in it."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        self.run(sys.executable, "-m", "venv", folder / "venv")
        self.python = folder / "venv" / "bin" / "python"
        self.run(self.python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)

    def run(self, *words: object, code: int = 0) -> str:
        """Run a command outside the repository, with nothing of ours in its environment."""
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(
            [str(word) for word in words], cwd=self.folder, env=clean, capture_output=True, text=True,
            timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == code, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def zeroblock(self, *words: object) -> str:
        return self.run(self.python.with_name("zeroblock"), *words)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder / "dist"), str(ROOT)]
    subprocess.run(pip, check=True, timeout=PATIENCE_S)
    (wheel,) = (folder / "dist").glob("*.whl")
    assert wheel.name.startswith(f"zeroblock-{__version__}-")
    return Environment(folder, wheel)


def test_it_brings_no_extras(environment: Environment) -> None:
    script = "import importlib.util as u; print([n for n in ('matplotlib', 'peft', 'gguf') if u.find_spec(n)])"
    assert environment.run(environment.python, "-c", script) == "[]\n"


def test_the_command_answers(environment: Environment) -> None:
    assert environment.zeroblock("--version") == f"zeroblock {__version__}\n"
    assert "one block at a time" in environment.zeroblock("--help")
    assert "mezo_bcd_adam" in environment.zeroblock("methods")


def test_five_steps_on_own_data(environment: Environment) -> None:
    folder = environment.folder
    environment.run(environment.python, "-c", MODEL, folder / "model")
    rows = [{"prompt": f"{n} plus one is", "completion": f" {n + 1}"} for n in range(40)]
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment.zeroblock(
        "train", "--model", folder / "model", "--task", "mine.jsonl", "--method", "mezo_bcd", "--lr", "1e-3",
        "--steps", 5, "--batch-size", 4, "--device", "cpu", "--out", "run", "--quiet",
    )  # fmt: skip
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["steps"] == 5
    environment.zeroblock("replay", "run", "--model", folder / "model", "--out", "tuned")
    assert (folder / "tuned" / "model.safetensors").stat().st_size > 0
