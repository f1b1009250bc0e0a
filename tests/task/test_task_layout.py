"""Layouts of the user's own data, the files and tables they come in, and which answers of a chat carry loss."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from run_toy import save_model
from zeroblock.engine import Engine
from zeroblock.errors import ZeroBlockError, ZeroBlockWarning
from zeroblock.evaluate.demonstration import Demonstrations
from zeroblock.evaluate.evaluator import Evaluator
from zeroblock.task import Encoder, Example, get, open_task
from zeroblock.task.layout import LAYOUTS
from zeroblock.task.own import located

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}</s>{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SAID = (("user", "Hi"), ("assistant", "Hello there!"), ("user", "And you?"), ("assistant", "Fine, thank you."))
CHAT = [{"role": role, "content": text} for role, text in SAID]
SHARED = [{"from": {"user": "human", "assistant": "gpt"}[role], "value": text} for role, text in SAID]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), spread=0.3)


@pytest.fixture(scope="module")
def words(folder: Path) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def only(data: Any, tokenizer: Any = None, **choices: Any) -> list[Example]:
    task = get(data if not isinstance(data, Path) else str(data), tokenizer, **choices)
    return [task.example(row) for row in task.rows("train")]


def test_sharegpt_is_read_as_openai(words: Any) -> None:
    chats = [{"messages": CHAT}], [{"conversations": SHARED}]
    (openai,), (shared,) = (only(rows, words) for rows in chats)
    assert openai == shared
    assert openai.context == "<user>Hi\n<assistant>Hello there!</s>\n<user>And you?\n<assistant>"
    assert openai.options == ("Fine, thank you.</s>",)
    assert [openai.context[begin:end] for begin, end in openai.spans] == ["Hello there!</s>"]
    (last,) = only(chats[0], words, turns="last")
    assert (last.context, last.options, last.spans) == (openai.context, openai.options, ())
    unanswered = [{"messages": [*CHAT, {"role": "user", "content": "Bye"}]}]
    assert only(unanswered, words) == [openai]


def test_alpaca() -> None:
    rows = [{"instruction": "Add.", "input": "1 {x}", "output": "2"}, {"instruction": "Sing.", "output": "La"}]
    both, bare = only(rows)
    assert both.context.endswith("request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 {x}\n\n### Response:\n")
    assert bare.context.endswith("describes a task. Write a response that appropriately completes the request.\n\n"
                                 "### Instruction:\nSing.\n\n### Response:\n")  # fmt: skip
    assert (both.options, bare.options) == (("2",), ("La",))


def test_an_unknown_layout_names_its_columns_and_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("text,label\ngood,1\n")
    with pytest.raises(ZeroBlockError) as caught:
        get(str(tmp_path / "x.csv"))
    message = str(caught.value)
    assert "x.csv:2: no known layout in the columns text, label" in message
    assert all(name in message for name in ("prompt, completion", "messages", "conversations", "instruction, output"))


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ({"conversations": SHARED}, {"conversations": [{"from": "cat", "value": "x"}]}, "message 1 is from 'cat'"),
        ({"conversations": SHARED}, {"conversations": [{"from": "gpt"}]}, "message 1 has no text in 'value'"),
        ({"messages": CHAT}, {"messages": [{**CHAT[1], "content": " "}, *CHAT]}, "message 1 is not an answer"),
        ({"instruction": "a", "output": "b"}, {"instruction": "a", "input": 3, "output": "b"}, "'input' holds int"),
        ({"instruction": "a", "output": "b"}, {"instruction": "a", "output": ""}, "the output is empty"),
    ],
)
def test_bad_rows_name_file_and_line(good: Any, bad: Any, message: str, tmp_path: Path, words: Any) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([good, bad], indent=1).replace("},\n {", "},\n\n {"))
    line = (tmp_path / "rows.json").read_text().split("\n\n")[0].count("\n") + 3
    with pytest.raises(ZeroBlockError, match=rf"rows\.json:{line}: .*{message}"):
        only(tmp_path / "rows.json", words)


ROWS = [{"prompt": f"{i} =", "completion": f" {i}"} for i in range(30)]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (json.dumps(ROWS), 1),
        ("\n" + json.dumps({"version": 1, "rows": ROWS, "tags": ["a"]}, indent=2), 5),
        ("".join(json.dumps(row) + "\n" for row in ROWS), 1),
    ],
)
def test_json(content: str, line: int, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(content)
    rows = get(str(file)).rows("train")
    assert [row.fields for row in rows] == ROWS
    assert rows[0].where == f"{file}:{line}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"prompt": "a",\n"completion": b}]', r":2: invalid JSON \(Expecting value at column 15\)"),
        ('[{"prompt": "a"}\n', ":2: invalid JSON .the list has no end"),
        ('[{"prompt": "a"},\n3]', ":2: expected a JSON object, found int"),
        ('{"a": [{"x": 1}], "b": [{"x": 1}]}', r"several lists of rows \(a, b\)"),
        ("[" * 100_000, ":1: nested too deeply|nested too deeply"),
        ("[]", "no rows in"),
    ],
)
def test_bad_json(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(ZeroBlockError, match=message):
        get(str(tmp_path / "rows.json"))


def test_one_chat_in_a_json_file_is_one_row(tmp_path: Path, words: Any) -> None:
    (tmp_path / "chat.json").write_text(json.dumps({"messages": CHAT}, indent=2))
    assert len(only(tmp_path / "chat.json", words)) == 1
    (tmp_path / "list.jsonl").write_text('[{"prompt": "a",\n"completion": "b"}]')
    with pytest.raises(ZeroBlockError, match=r"list\.jsonl:1: begins a JSON list.*or name the file \.json"):
        get(str(tmp_path / "list.jsonl"))


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([*ROWS, {"prompt": "x", "completion": ""}]), file)
    rows = get(str(file)).rows("train")
    assert [row.fields for row in rows[:-1]] == ROWS
    with pytest.raises(ZeroBlockError, match=r"rows\.parquet:31: the completion is empty"):
        get(str(file)).load()
    file.write_bytes(b"PAR1 no more")
    with pytest.raises(ZeroBlockError, match=r"rows\.parquet: invalid Parquet"):
        get(str(file))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ZeroBlockError, match="is a Parquet file: pip install pyarrow"):
        get(str(file))


def test_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects, a folder that they were saved to, and a local folder in the place of a dataset of the hub."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    train, test = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS[:5])
    both = datasets.DatasetDict(train=train, test=test)

    splits = open_task(both).load()
    assert (len(splits.train) + len(splits.dev), len(splits.test)) == (30, 5)
    assert len(open_task(train).load().test) == 6  # held out
    sentiment = datasets.Dataset.from_dict({"sentence": ["fine"] * 9, "label": [1] * 8 + [7]})
    with pytest.raises(ZeroBlockError, match=r"dataset train\[8\]: unknown label 7"):
        get("sst2").load({"train": sentiment, "validation": sentiment})
    with pytest.raises(ZeroBlockError, match="take rows out of a stream with"):
        open_task(train.to_iterable_dataset())

    both.save_to_disk(tmp_path / "saved")
    assert get(str(tmp_path / "saved")).load() == splits

    hub = tmp_path / "hub" / "words"
    for part, table in both.items():
        table.rename_columns({"prompt": "question", "completion": "reply"}).to_json(hub / f"{part}.jsonl")
    name = f"hf:{hub},prompt=question,completion=reply"
    task = get(name)
    assert (task.name, task.load()) == ("words", splits)
    assert get(f"{name},split=train[:10],validation=test").rows("train")[9].where == f"{hub} train[:10][9]"
    for more, message in (
        (",split=tran", "unknown split of hf:.*'tran'; did you mean 'train'"),
        (",subset=a", "unknown setting of hf:.*'subset'"),
        (",config=nope", "cannot get hf:"),
        (",split=", "gives split no value"),
    ):
        with pytest.raises(ZeroBlockError, match=message):
            get(name + more)
    with pytest.raises(ZeroBlockError, match=r"no column 'reply'; the row has: prompt, completion"):
        get(f"hf:{_written(both, tmp_path / 'hub' / 'plain')},completion=reply")
    monkeypatch.chdir(hub.parent)
    assert located(name.replace(str(hub), "./words")) == name
    (tmp_path / "t.toml").write_text(
        f'train = "hf:{hub}"\nprompt = "{{question}}"\nanswer = " {{reply}}"\nmetric = "likelihood"\n'
    )
    task = get(str(tmp_path / "t.toml"))
    assert (task.load().test[0].answers, task.metric.name, task.stop) == (splits.test[0].answers, "likelihood", None)


def _written(both: Any, folder: Path) -> Path:
    for part, table in both.items():
        table.to_json(folder / f"{part}.jsonl")
    return folder


def expected_marks(words: Any, text: str, answers: list[str]) -> tuple[list[int], list[bool]]:
    """Token ids of a whole text, and which of them lie in an answer, by the offsets of the tokenizer."""
    found = words(text, add_special_tokens=False, return_offsets_mapping=True)
    places, at = [], 0
    for answer in answers:
        at = text.index(answer, at)
        places.append(range(at, at + len(answer)))
        at += len(answer)
    return found["input_ids"], [any(b in place for place in places) for b, _ in found["offset_mapping"]]


@pytest.mark.parametrize("templated", [True, False])
def test_all_answers_carry_loss_as_labels_of_minus_100_do(templated: bool, folder: Path, words: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = words if templated else transformers.AutoTokenizer.from_pretrained(folder)
    rows = [{"messages": CHAT}, {"messages": CHAT[2:]}]
    if templated:
        task = get(rows, tokenizer)
    else:
        with pytest.warns(ZeroBlockWarning, match="no chat template, so chats are written as plain lines") as caught:
            task = get(rows, tokenizer)
        assert len(caught) == 1
    head = "<assistant>" if templated else "Assistant: "
    encoder = task.encoder(tokenizer)
    encoded = [encoder.target(task.example(row)) for row in task.rows("train")]
    total, count = 0.0, 0
    for one, row in zip(encoded, rows, strict=True):
        said = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        example = task.example(task.rows("train")[rows.index(row)])
        text = example.context + example.options[0].removesuffix("</s>") + "</s>"
        assert text.count("</s>") == len(said)  # each answer ends with the token that generation stops at
        ids, marks = expected_marks(tokenizer, text, [(" " * (not templated)) + answer + "</s>" for answer in said])
        assert list(one.context + one.options[0]) == ids
        assert [False] * len(one.context) + list(one.marks[0]) == marks
        assert head in text
        labels = torch.where(torch.tensor(marks), torch.tensor(ids), -100)[None]
        with torch.no_grad():
            total += float(model(input_ids=torch.tensor([ids]), labels=labels).loss) * sum(marks)
        count += sum(marks)
    with torch.no_grad():
        loss = float(Engine(model).objective(encoded, [0, 0], over="answer")())
    assert loss == pytest.approx(total / count, abs=1e-5)


def test_answers_that_are_cut_off_carry_no_loss(words: Any) -> None:
    (example,) = only([{"messages": CHAT}], words)
    whole = Encoder.of(words, eos=True).target(example)
    for max_length in range(20, len(whole.rows[0][0])):
        one = Encoder.of(words, max_length, eos=True).target(example)
        ids = one.rows[0][0]
        assert len(ids) == max_length
        assert words.decode([t for t, m in zip(one.options[0], one.marks[0], strict=True) if m]) in (
            "Hello there!</s>Fine, thank you.</s>",
            "Fine, thank you.</s>",
        )
    shown = example.after("An example.\n\n")
    assert [shown.context[b:e] for b, e in shown.spans] == ["Hello there!</s>"]


def test_a_template_that_rewrites_earlier_answers_is_found_out(words: Any) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(words.name_or_path)
    tokenizer.chat_template = TEMPLATE.replace(
        "{{ m['content'] }}", "{{ m['content'] if loop.last or m['role'] == 'user' else 'cut' }}"
    )
    with pytest.raises(ZeroBlockError, match=r"train\[0\]: the chat template writes message 2 differently.*last"):
        only([{"messages": CHAT}], tokenizer)
    assert len(only([{"messages": CHAT}], tokenizer, turns="last")) == 1


def test_long_answers_are_measured_by_their_loss(folder: Path, words: Any) -> None:
    rows = [{"prompt": f"{i}:", "completion": " one two three four five"} for i in range(18)]
    long = {"prompt": "x:", "completion": " one two three four five six"}
    assert open_task([*rows, long, long]).metric.name == "f1"  # nine of ten are short
    task = open_task([*rows, long, long, long], words)
    assert (task.metric.name, task.kind) == ("likelihood", "generation")
    assert open_task([long], metric="f1").metric.name == "f1"
    with pytest.raises(ZeroBlockError, match="no rows in dataset"):
        open_task([])
    with pytest.raises(ZeroBlockError, match="metric accuracy is for tasks with options"):
        open_task([long], metric="accuracy")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    evaluator = Evaluator(Engine(model), words, task, task.encoder(words), Demonstrations(()))
    exam = evaluator.exam(task.load().train[:3])
    assert not exam.prompts  # nothing is generated
    found = evaluator(exam)
    assert found.value == pytest.approx(torch.tensor(-found.loss).exp().item())
    assert 0 < found.value < 1
    assert task.metric.score(float("nan")) == 0


def test_the_samples_of_the_guide_are_read(tmp_path: Path, words: Any) -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "data.md"
    samples = re.findall(r"```json\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL)
    assert len(samples) == len(LAYOUTS)
    for number, sample in enumerate(samples):
        (tmp_path / f"{number}.jsonl").write_text(sample)
        assert len(only(tmp_path / f"{number}.jsonl", words)) == 3
