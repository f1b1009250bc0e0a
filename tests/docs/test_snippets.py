"""The Python of the pages runs as written, on a tiny model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import zeroblock as zb
from zeroblock.method import METHODS
from zeroblock.sweep.plan import Sweep
from zeroblock.task import Encoded

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["start.md", "guides/loop.md", "guides/objectives.md", "methods.md"]
CONFIG = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip


def fresh() -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert snippets
    model = fresh()
    tokens = torch.arange(3, 21).view(2, 9)
    batch = {"input_ids": tokens, "labels": tokens}
    names: dict[str, Any] = {
        "zb": zb, "torch": torch, "model": model, "batch": batch, "a": tokens[:1], "b": tokens[1:],
        "optimizer": zb.mezo_bcd(model, steps=2000), "objective": lambda x: model(input_ids=x, labels=x).loss,
        "closure": lambda: names["model"](**batch).loss, "encoded": [Encoded((3, 4, 5), ((6,), (7, 8)))],
        "labels": [1], "accuracy": lambda m: float((m(tokens).logits.argmax(-1) == tokens).float().mean()),
        "generate": lambda m, prompts: m(tokens).logits.argmax(-1).tolist(), "prompts": tokens, "reward": len,
        "range": lambda count: iter([0] * min(count, 2)),
    }  # fmt: skip
    for snippet in snippets:
        if "records = []" in snippet:  # a replay starts where its run did
            before, _, after = snippet.partition("records = []")
            exec(before, names)
            names["model"], names["base_model"] = fresh(), fresh()
            names["optimizer"] = zb.mezo_bcd(names["model"], steps=2000)
            exec("records = []" + after, names)
            assert torch.equal(names["model"].lm_head.weight, names["base_model"].lm_head.weight)
        else:
            exec(snippet, names)


def test_the_sweep_file_of_the_guide(tmp_path: Path) -> None:
    text = (DOCS / "guides" / "sweeps.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "find-lr.toml").write_text(snippet)
    sweep = Sweep.load(tmp_path / "find-lr.toml")
    assert len(sweep.rows) == 2
    assert len(sweep.runs) == 6


def test_the_table_of_methods_names_them_all() -> None:
    table = (
        (DOCS / "methods.md").read_text(encoding="utf-8").partition("| method | partition |")[2].partition("\n\n")[0]
    )
    names = [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(names) == sorted(METHODS)
