"""Runs of encoder-decoders: what they read and write, a run that is resumed and replayed, generation, and adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from loop_toy import Crash, kept, lines, settings

import masked_toy
import zeroblock as zb
from seq2seq_toy import save, tokenizer
from toy import same, snapshot, zeroblock
from zeroblock.errors import ZeroBlockError
from zeroblock.evaluate.generate import generate
from zeroblock.model import load, skeleton
from zeroblock.model import tokenizer as read_tokenizer
from zeroblock.report.card import pipeline_of
from zeroblock.task import TASKS, DataRow, Example, open_task
from zeroblock.train import resume, run


@pytest.fixture(scope="module")
def flan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gated, and with a head of its own."""
    return save(tmp_path_factory.mktemp("flan"), "flan-t5")


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("bart"), "bart")


def test_the_encoder_reads_the_context_and_the_decoder_writes_an_option() -> None:
    sst2, words = TASKS["sst2"], tokenizer()
    one = sst2.encoder(words, seq2seq=True).example(sst2.example(DataRow({"sentence": "bad ", "label": 0})))
    assert words.decode(one.context) == "bad It was</s>"
    assert [words.decode(option) for option in one.options] == ["terrible", "great"]
    assert (one.scored, one.seq2seq, one.only(1).seq2seq) == (None, True, True)
    opened = sst2.encoder(masked_toy.tokenizer("Roberta"), seq2seq=True)("bad", (" great",))
    assert [words.decode(ids) for ids in (opened.context, *opened.options)] == ["<s>bad</s>", "<s>great"]
    assert opened.marks[0][:2] == (False, True)  # the decoder reads BART's <s>, and nothing is learned from it
    example = Example("Q", (" slow fun\n",), 0, ("slow fun",))
    squad = TASKS["squad"].encoder(words, seq2seq=True)
    assert words.decode(squad.target(example).options[0]) == "slow fun</s>"  # generation ends there, not at a newline
    assert squad.prompt(example, 9).options == ()
    empty = squad("", ("good",))
    assert words.decode(empty.context) == "</s>"


def test_long_contexts_are_cut_on_the_left_and_what_does_not_fit_is_refused() -> None:
    words, sst2 = masked_toy.tokenizer("Roberta"), TASKS["sst2"]
    row = DataRow({"sentence": "bad sad slow " * 20, "label": 0}, "file:3")
    whole, cut = (sst2.encoder(words, n, seq2seq=True).example(sst2.example(row)) for n in (512, 12))
    assert (len(cut.context), cut.cut) == (12, len(whole.context) - 12)
    assert (cut.context[0], cut.context[1:]) == (whole.context[0], whole.context[-11:])
    long = Example("bad", (" terrible great good",), 0, where="file:3")
    with pytest.raises(ZeroBlockError, match=r"file:3: an option of \d+ tokens and a context do not fit into"):
        sst2.encoder(words, 4, seq2seq=True).example(long)
    chat = Example("a: b c: d", (" e",), 0, spans=((3, 4),), where="file:4")
    with pytest.raises(ZeroBlockError, match=r"file:4: the earlier answers of a chat.*--turns last"):
        sst2.encoder(words, seq2seq=True).target(chat)


@pytest.mark.parametrize(("method", "options"), [("mezo_bcd", {"probes": 2, "clip": 5.0}), ("lozo", {})])
def test_a_run_resumes_and_replays(
    flan: Path, data: Path, tmp_path: Path, models: list[Any], method: str, options: dict[str, Any]
) -> None:
    config = settings(flan, data, steps=20, lr=2e-3, eval_every=10, batch_size=16, method=method, **options)
    run(config, tmp_path / "whole")
    with pytest.raises(RuntimeError, match="a crash"):
        run(config, tmp_path / "parts", Crash(7))
    resume(tmp_path / "parts")
    assert same(snapshot(models[0]), snapshot(models[-1]))
    assert kept(tmp_path / "whole") == kept(tmp_path / "parts")
    base = load(str(flan), "fp32", "cpu")
    assert not same(snapshot(models[0]), snapshot(base))
    zb.load(base, tmp_path / "whole")
    assert same(snapshot(models[0]), snapshot(base))
    if method == "lozo":
        return
    evaluations = [line for line in lines(tmp_path / "whole") if line["kind"] == "eval" and line["split"] == "test"]
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]
    done = zeroblock("replay", tmp_path / "whole", "--step", 20, "--out", tmp_path / "tuned")
    assert (done.returncode, "AutoModelForSeq2SeqLM.from_pretrained" in done.stdout) == (0, True), done.stderr
    assert "AutoModelForSeq2SeqLM.from_pretrained" in (tmp_path / "tuned" / "README.md").read_text()
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "tuned")
    assert same(snapshot(models[0]), snapshot(again))
    done = zeroblock("eval", "--model", tmp_path / "tuned", "--task", "sst2", "--data", data, "--json")
    assert json.loads(done.stdout)["value"] == evaluations[-1]["value"]


@torch.no_grad()
def greedy(model: Any, context: tuple[int, ...], opening: tuple[int, ...], end: int, most: int) -> list[int]:
    """The tokens that a model writes, one at a time, without a cache and without padding."""
    written = list(opening)
    for _ in range(most):
        ids = torch.tensor([written])
        logits = model(input_ids=torch.tensor([context]), decoder_input_ids=ids, use_cache=False).logits
        written.append(int(logits[0, -1].argmax()))
        if written[-1] == end:
            break
    return written[len(opening) :]


@pytest.mark.parametrize("name", ["flan", "bart"])
def test_generation_of_a_batch_is_that_of_each_prompt_alone(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    model, words = load(str(folder), "fp32", "cpu"), read_tokenizer(str(folder))
    torch.manual_seed(0)
    for param in model.parameters():
        param.data += 0.3 * torch.randn_like(param)  # so that it writes other words for other prompts
    encoder = TASKS["squad"].encoder(words, seq2seq=True)
    opening = (model.config.decoder_start_token_id, *encoder.opening)
    assert len(opening) == (2 if name == "bart" else 1)
    prompts = [encoder(text, ()).context for text in ("It was bad. Was it?", "fun", "0123456789 0123456789 slow")]
    found = generate(model, words, prompts, stop=None, max_new_tokens=8, opening=opening)
    for prompt, text in zip(prompts, found, strict=True):
        tokens = greedy(model, prompt, opening, words.eos_token_id, 8)
        assert text == words.decode(tokens, skip_special_tokens=True).strip()
    assert len(set(found)) > 1


def test_a_task_that_generates(bart: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} is", "completion": f" {'good' if n % 2 else 'bad'}"} for n in range(40)]
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    folder = tmp_path / "run"
    given = ("--model", bart, "--task", file, "--lr", 1e-3, "--steps", 2, "--batch-size", 4, "--metric", "f1")
    done = zeroblock("train", *given, "--out", folder)
    assert (done.returncode, "point after another" in done.stderr) == (0, False), done.stderr
    assert {line["metric"] for line in lines(folder) if line["kind"] == "eval"} == {"f1"}
    seen = zeroblock("tasks", "show", file, "--model", bart, "--limit", 1).stdout
    assert "'bad' </s>" in seen, seen
    task = open_task(str(file))
    assert task.encoder(tokenizer(), seq2seq=True).target(task.load().train[0]).seq2seq


def test_the_command_line_lists_blocks_and_attaches_adapters(flan: Path, data: Path, tmp_path: Path) -> None:
    names = [block["name"] for block in json.loads(zeroblock("blocks", "--model", flan, "--json").stdout)["blocks"]]
    layers = [f"encoder.block.{n}" for n in range(2)] + [f"decoder.block.{n}" for n in range(3)]
    assert names == ["shared", *layers, "encoder.final_layer_norm", "decoder.final_layer_norm", "lm_head"]
    assert [block.name for block in zb.mezo_bcd(load(str(flan), "fp32", "cpu"), lr=1.0).blocks] == names
    seen = zeroblock("tasks", "show", "sst2", "--data", data, "--model", flan, "--limit", 1).stdout
    assert ("It was\n" in seen, "'terrible'" in seen) == (True, True), seen
    model = ("--model", flan, "--data", data, "--device", "cpu", "--task", "sst2", "--lr", 1e-2, "--steps", 2)
    done = zeroblock("train", *model, "--lora", "r=2,targets=q,v", "--batch-size", 4, "--out", tmp_path / "lora")
    assert (done.returncode, "point after another" in done.stderr) == (0, False), done.stderr
    assert pipeline_of(tmp_path / "lora" / "adapter") == "text2text-generation"
    settled = json.loads((tmp_path / "lora" / "adapter" / "adapter_config.json").read_text())
    assert settled["task_type"] == "SEQ_2_SEQ_LM"
    done = zeroblock("train", *model, "--prefix", 3)
    assert (done.returncode, "use LoRA" in done.stderr) == (2, True), done.stderr
    done = zeroblock("train", *model, "--weights", "int8", "--batch-size", 4, "--out", tmp_path / "int8")
    assert done.returncode == 0, done.stderr
    done = zeroblock("plan", *model, "--seconds", 0, "--json")
    assert json.loads(done.stdout)["timing"]["steps"] > 0, done.stderr


def test_a_skeleton_has_the_head_of_its_checkpoint(flan: Path, tmp_path: Path) -> None:
    tied = save(tmp_path / "tied", "t5")
    for folder, heads in ((flan, ["lm_head.weight"]), (tied, [])):
        for model in (skeleton(str(folder)), load(str(folder), "fp32", "cpu")):
            assert [name for name, _ in model.named_parameters() if name.startswith("lm_head")] == heads
