"""Runs of masked language models: prompts with a mask, a run that learns, is resumed and replayed, and eval."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from loop_toy import Crash, kept, lines, settings

import seq2seq_toy
import zeroblock as zb
from masked_toy import save, tokenizer
from toy import same, snapshot, zeroblock
from zeroblock.errors import ZeroBlockError
from zeroblock.model import load
from zeroblock.report.card import pipeline_of
from zeroblock.task import TASKS, DataRow
from zeroblock.train import resume, run


@pytest.fixture(scope="module")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("roberta"), "Roberta")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("bert"), "Bert")


RTE = {"premise": "Bad.", "hypothesis": "It was bad", "label": 0}
BOOLQ = {"passage": "It was bad.", "question": "was it", "label": 0}
CASES = [
    ("Roberta", "sst2", {"sentence": "bad ", "label": 0}, "<s>bad It was<mask>.</s>", " terrible, great"),
    ("Bert", "sst2", {"sentence": "bad ", "label": 0}, "[CLS] bad It was [MASK]. [SEP]", "terrible,great"),
    ("Roberta", "rte", RTE, "<s>Bad?<mask>, it was bad</s>", " Yes, No"),
    ("Roberta", "cb", RTE, "<s>Bad?<mask>, it was bad</s>", " Yes, No, Maybe"),
    ("Roberta", "boolq", BOOLQ, "<s>It was bad. Was it?<mask>.</s>", " No, Yes"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "row", "text", "words"), CASES)
def test_a_masked_model_reads_a_gap(kind: str, name: str, row: dict[str, Any], text: str, words: str) -> None:
    written = tokenizer(kind)
    task = TASKS[name]
    one = task.encoder(written, masked=True).example(task.example(DataRow(row)))
    assert one.mask == one.context.index(written.mask_token_id)
    assert written.decode(one.context).replace(" .", ".") == text
    assert ",".join(written.decode(option) for option in one.options) == words


def test_long_texts_are_cut_on_the_left_and_what_cannot_be_asked_is_refused() -> None:
    words, sst2 = tokenizer("Roberta"), TASKS["sst2"]
    row = DataRow({"sentence": "bad sad slow " * 20, "label": 0}, "file:3")
    whole, cut = (sst2.encoder(words, n, masked=True).example(sst2.example(row)) for n in (512, 12))
    assert (cut.context[0], len(cut.context), cut.cut) == (whole.context[0], 12, len(whole.context) - 12)
    assert cut.context[1:] == whole.context[-11:]
    assert cut.context[cut.mask] == words.mask_token_id
    encoder = sst2.encoder(words, masked=True)
    with pytest.raises(ZeroBlockError, match="file:3: the text holds '<mask>'"):
        encoder.example(sst2.example(DataRow({"sentence": "a <mask>", "label": 0}, "file:3")))
    with pytest.raises(ZeroBlockError, match=r"'marvellous' has \d+ tokens, and a mask stands for one"):
        encoder("It was", (" great", " marvellous"))
    with pytest.raises(ZeroBlockError, match="'great' is unknown to the tokenizer"):
        sst2.encoder(transformers_without("great"), masked=True)("It was", (" great",))
    with pytest.raises(ZeroBlockError, match="fills in single words and generates no text"):
        TASKS["squad"].encoder(words, masked=True).prompt(sst2.example(row), 5)


def transformers_without(word: str) -> transformers.PreTrainedTokenizerFast:
    """BERT's kind of tokenizer, of a model that has never seen a word."""
    from tokenizers import Tokenizer

    state = json.loads(tokenizer("Bert").backend_tokenizer.to_str())
    state["model"]["vocab"] = {piece: n for piece, n in state["model"]["vocab"].items() if piece[0] != word[0]}
    inner = Tokenizer.from_str(json.dumps(state))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", mask_token="[MASK]")


def test_a_run_learns_and_resumes_and_replays(roberta: Path, data: Path, tmp_path: Path, models: list[Any]) -> None:
    config = settings(roberta, data, steps=20, lr=2e-2, eval_every=10, batch_size=16, probes=2, clip=5.0)
    run(config, tmp_path / "whole")
    with pytest.raises(RuntimeError, match="a crash"):
        run(config, tmp_path / "parts", Crash(7))
    resume(tmp_path / "parts")
    assert same(snapshot(models[0]), snapshot(models[-1]))
    assert kept(tmp_path / "whole") == kept(tmp_path / "parts")
    base = load(str(roberta), "fp32", "cpu")
    assert not same(snapshot(models[0]), snapshot(base))
    zb.load(base, tmp_path / "whole")
    assert same(snapshot(models[0]), snapshot(base))
    evaluations = [line for line in lines(tmp_path / "whole") if line["kind"] == "eval" and line["split"] == "test"]
    assert evaluations[-1]["loss"] < 0.98 * evaluations[0]["loss"]
    done = zeroblock("replay", tmp_path / "whole", "--step", 20, "--out", tmp_path / "tuned")
    assert (done.returncode, 'pipeline("fill-mask"' in done.stdout) == (0, True), done.stderr
    assert "AutoModelForMaskedLM.from_pretrained" in (tmp_path / "tuned" / "README.md").read_text()
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "tuned")
    assert same(snapshot(models[0]), snapshot(again))
    done = zeroblock("eval", "--model", tmp_path / "tuned", "--task", "sst2", "--data", data, "--json")
    assert json.loads(done.stdout)["value"] == evaluations[-1]["value"]


def test_the_command_line_lists_blocks_and_attaches_adapters(bert: Path, data: Path, tmp_path: Path) -> None:
    found = json.loads(zeroblock("blocks", "--model", bert, "--json").stdout)["blocks"]
    assert [block["name"] for block in found] == [
        *(f"bert.embeddings.{name}_embeddings" for name in ("word", "position", "token_type")),
        "bert.embeddings.LayerNorm", "bert.encoder.layer.0", "bert.encoder.layer.1", "cls.predictions",
        "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm",
    ]  # fmt: skip
    seen = zeroblock("tasks", "show", "sst2", "--data", data, "--model", bert, "--limit", 1).stdout
    assert re.search(r"It was \[MASK\]\.\n.*'terrible'", seen), seen
    model = ("--model", bert, "--data", data, "--device", "cpu")
    lora = ("--lora", "r=2,targets=q,v", "--steps", 2, "--lr", 1e-2, "--batch-size", 4, "--out", tmp_path / "lora")
    done = zeroblock("train", *model, "--task", "sst2", *lora)
    assert (done.returncode, "point after another" in done.stderr) == (0, False), done.stderr
    assert pipeline_of(tmp_path / "lora" / "adapter") == "fill-mask"
    done = zeroblock("train", *model, "--task", "sst2", "--lr", 1e-2, "--steps", 2, "--prefix", 3)
    assert (done.returncode, "use LoRA" in done.stderr) == (2, True), done.stderr
    done = zeroblock("eval", *model, "--task", "squad")
    assert (done.returncode, "fills in single words and generates no text" in done.stderr) == (2, True), done.stderr


def test_the_python_of_the_guide(roberta: Path, tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "guides" / "encoders.md"
    snippets = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    tokens = torch.tensor([[3, 3, 3, 3, 5]])
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    llava = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(image_size=8, patch_size=4, **shape),
        text_config=transformers.LlamaConfig(vocab_size=16, **shape), image_token_id=3,
    )  # fmt: skip
    names = {
        "roberta": load(str(roberta), "fp32", "cpu"), "tokenizer": tokenizer("Roberta"),
        "t5": load(str(seq2seq_toy.save(tmp_path / "t5")), "fp32", "cpu"), "questions": tokens, "answers": tokens,
        "tokens": tokens,
        "llava": transformers.LlavaForConditionalGeneration(llava), "pixels": torch.randn(1, 3, 8, 8),
    }  # fmt: skip
    for snippet in snippets:
        exec(snippet, names)
        assert names["optimizer"].steps == 1
    assert len(snippets) == 4
