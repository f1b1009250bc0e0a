"""The user's own data: prompt and completion, chats, and tasks described in TOML."""

from __future__ import annotations

import json

import pytest

from zeroblock.errors import ZeroBlockError, ZeroBlockWarning
from zeroblock.task import Example, get


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def only(path, tokenizer=None, **choices):
    """The examples of a task, in the order of its file."""
    task = get(str(path), tokenizer, **choices)
    return task, [task.example(row) for row in task.rows("train")]


def test_prompt_and_completion(tmp_path):
    rows = [{"prompt": "cat ->", "completion": " chat"}, {"prompt": "dog -> ", "completion": "chien \n"}]
    task, examples = only(write(tmp_path / "words.jsonl", rows))
    assert examples == [
        Example("cat ->", (" chat",), 0, ("chat",), None),
        Example("dog ->", (" chien \n",), 0, ("chien",), None),
    ]
    assert (task.name, task.kind, task.over, task.metric.name, task.stop) == (
        "words",
        "generation",
        "answer",
        "f1",
        None,
    )
    task, examples = only(tmp_path / "words.jsonl", ending="newline")
    assert [example.options for example in examples] == [(" chat\n",), (" chien \n",)]
    assert task.stop == "\n"


def test_prompts_keep_their_indentation(tmp_path):
    rows = [{"prompt": "    if x:\n        return ", "completion": "1  "}]
    _, (example,) = only(write(tmp_path / "code.jsonl", rows))
    assert (example.context, example.options) == ("    if x:\n        return", (" 1",))


def test_both_kinds_of_file(tmp_path):
    rows = [{"prompt": f"{i}:", "completion": " a"} for i in range(9)]
    write(tmp_path / "train.jsonl", rows)
    (tmp_path / "validation.csv").write_text("prompt,completion\nasked:, b\n")
    assert [example.context for example in get(str(tmp_path)).load().test] == ["asked:"]
    write(tmp_path / "validation.jsonl", rows)
    with pytest.raises(ZeroBlockError, match=r"has validation\.jsonl and validation\.csv: remove one"):
        get(str(tmp_path))


def test_completions_of_many_lines_end_in_eos(tmp_path):
    rows = [{"prompt": "list:", "completion": "\none\ntwo"}, {"prompt": "list:", "completion": " x"}]
    task, examples = only(write(tmp_path / "long.jsonl", rows), ending="newline")
    assert task.stop is None
    assert [example.options for example in examples] == [("\none\ntwo",), (" x",)]


@pytest.mark.parametrize("completion", ["\nyes", "\n\nyes", " a\nb", " yes\n", " yes"])
def test_a_completion_is_found_again_where_generation_stops(tmp_path, completion):
    """What is generated is read up to the stop, so the stop must not come before the answer does."""
    path = write(tmp_path / "r.jsonl", [{"prompt": "x:", "completion": completion}])
    task, (example,) = only(path, ending="newline")
    read = example.options[0] if task.stop is None else example.options[0].partition(task.stop)[0]
    assert read.strip() == example.answers[0] != ""


def test_validation_rows_say_too_how_completions_end(tmp_path):
    write(tmp_path / "train.jsonl", [{"prompt": "x:", "completion": " a"}])
    write(tmp_path / "validation.jsonl", [{"prompt": "x:", "completion": " a\nb"}])
    assert get(str(tmp_path), ending="newline").stop is None


@pytest.mark.parametrize(
    ("answer", "stop"), [(" {r}\\n", "\n"), ("\\n{r}\\n", None), (" {r}", None), (" {r}\\n\\n", "\n")]
)
def test_toml_answers_stop_where_they_end(tmp_path, answer, stop):
    write(tmp_path / "q.jsonl", [{"q": "why", "r": "so"}])
    (tmp_path / "q.toml").write_text(f'train = "q.jsonl"\nprompt = "{{q}}"\nanswer = "{answer}"\nmax_new_tokens = 7\n')
    task, _ = only(tmp_path / "q.toml")
    assert (task.stop, task.max_new_tokens) == (stop, 7)


def test_a_toml_answer_of_several_lines_where_one_is_announced(tmp_path):
    write(tmp_path / "q.jsonl", [{"q": "why", "r": "so"}, {"q": "why", "r": "so\nit is"}])
    (tmp_path / "q.toml").write_text('train = "q.jsonl"\nprompt = "{q}"\nanswer = " {r}\\n"\n')
    with pytest.raises(ZeroBlockError, match=r"q\.jsonl:2: an answer has several lines.*leave the newline out"):
        only(tmp_path / "q.toml")


def test_lines_of_a_csv_with_blank_ones(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text('\n"prompt",completion\nq, a\n\n\nq2,\n')
    with pytest.raises(ZeroBlockError, match=r"p\.csv:6: the completion is empty"):
        only(path)


def test_csv(tmp_path):
    path = tmp_path / "words.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,completion\r\n"cat\n->", chat\r\ndog ->, chien\r\n')
    task, examples = only(path)
    assert [(e.context, e.options) for e in examples] == [("cat\n->", (" chat",)), ("dog ->", (" chien",))]
    assert [row.where for row in task.rows("train")] == [f"{path}:2", f"{path}:4"]


def test_without_validation_test_is_held_out(tmp_path):
    path = write(tmp_path / "n.jsonl", [{"prompt": f"{i} =", "completion": f" {i}"} for i in range(50)])
    splits = get(str(path)).load(seed=0)
    assert tuple(map(len, (splits.train, splits.dev, splits.test))) == (32, 8, 10)
    assert len(set(splits.train + splits.dev + splits.test)) == 50
    assert "held out" in splits.note


def test_folder(tmp_path):
    write(tmp_path / "train.jsonl", [{"prompt": f"{i} =", "completion": " t"} for i in range(10)])
    write(tmp_path / "validation.jsonl", [{"prompt": "v =", "completion": " v"}])
    splits = get(str(tmp_path)).load()
    assert tuple(map(len, (splits.train, splits.dev, splits.test))) == (8, 2, 1)
    assert splits.test[0].context == "v ="


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
]


class Chatty:
    """A tokenizer as far as chats go: ChatML."""

    chat_template = "chatml"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt=False):
        assert not tokenize
        text = "".join(f"<|{m['role']}|>{m['content']}<|end|>\n" for m in messages)
        return text + ("<|assistant|>" if add_generation_prompt else "")


def test_chat_by_template(tmp_path):
    task, examples = only(write(tmp_path / "chat.jsonl", [{"messages": CHAT}]), Chatty())
    assert examples == [
        Example(
            "<|system|>Be brief.<|end|>\n<|user|>Hi<|end|>\n<|assistant|>", ("Hello!<|end|>",), 0, ("Hello!",), None
        )
    ]
    assert task.stop is None


def test_chat_without_template(tmp_path):
    with pytest.warns(ZeroBlockWarning, match="no tokenizer is given, so chats are written as plain lines"):
        _, examples = only(write(tmp_path / "chat.jsonl", [{"messages": CHAT}]))
    assert examples == [Example("System: Be brief.\nUser: Hi\nAssistant:", (" Hello!",), 0, ("Hello!",), None)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, "no column 'completion'"),
        ({"prompt": "x", "completion": None}, "column 'completion' is empty"),
        ({"prompt": "x", "completion": " "}, "the completion is empty"),
        ({"prompt": "x", "completion": 4}, "expected text"),
    ],
)
def test_bad_completion(row, message, tmp_path):
    path = write(tmp_path / "p.jsonl", [{"prompt": "a", "completion": "b"}, row])
    with pytest.raises(ZeroBlockError, match=rf"p\.jsonl:2: .*{message}"):
        get(str(path)).load()


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no list of messages"),
        (CHAT[:2], "no answer of the assistant"),
        ([{"role": "assistant", "content": " "}], "not an answer"),
        ([{"role": "user"}, CHAT[2]], "message 1 has no text in 'content'"),
        (["hello"], "message 1 has no text in 'role'"),
    ],
)
def test_bad_chat(messages, message, tmp_path):
    path = write(tmp_path / "c.jsonl", [{"messages": CHAT}, {"messages": messages}])
    with pytest.raises(ZeroBlockError, match=rf"c\.jsonl:2: .*{message}"):
        get(str(path), Chatty()).load()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prompt,completion\na,b,c\n", r"p\.csv:2: more than the header's 2 columns"),
        ("prompt,completion\na,b\nc\n", r"p\.csv:3: column 'completion' is empty"),
        ('prompt,completion\na,"b\n', r"p\.csv:2: invalid CSV"),
        ("prompt,completion,completion\na,b,c\n", r"p\.csv:1: the header has the column 'completion' twice"),
        ("prompt,completion\n", "no rows in"),
    ],
)
def test_bad_csv(content, message, tmp_path):
    (tmp_path / "p.csv").write_text(content)
    with pytest.raises(ZeroBlockError, match=message):
        get(str(tmp_path / "p.csv")).load()


def test_no_such_file(tmp_path):
    with pytest.raises(ZeroBlockError, match="no task file"):
        get(str(tmp_path / "none.toml"))
    with pytest.raises(ZeroBlockError, match=r"no train\.jsonl, .* or train\.parquet in"):
        get(str(tmp_path))


MOOD = """
train = "mood.csv"
prompt = "{text} It was "
options = ["terrible", "great"]
label = "mood"
labels = ["neg", "pos"]
calibration = "It was"
"""


def test_toml_classification(tmp_path):
    (tmp_path / "mood.toml").write_text(MOOD)
    (tmp_path / "mood.csv").write_text("text,mood\nI slept.,neg\nI laughed.,pos\n")
    task, examples = only(tmp_path / "mood.toml")
    options = (" terrible", " great")
    assert examples == [
        Example("I slept. It was", options, 0, calibration="It was"),
        Example("I laughed. It was", options, 1, calibration="It was"),
    ]
    assert (task.name, task.kind, task.metric.name, task.fields) == (
        "mood",
        "classification",
        "accuracy",
        ("text", "mood"),
    )


def test_toml_reads_from_the_users_folder(tmp_path):
    (tmp_path / "mood.toml").write_text(MOOD + 'validation = "held.csv"\nname = "m"\n')
    there = tmp_path / "there"
    there.mkdir()
    (there / "mood.csv").write_text("text,mood\nx,neg\n")
    (there / "held.csv").write_text("text,mood\ny,pos\n")
    task = get(str(tmp_path / "mood.toml"))
    assert task.name == "m"
    assert task.load(there).test[0].context == "y It was"
    with pytest.raises(ZeroBlockError, match=r"cannot read .*mood\.csv"):
        task.load()


def test_toml_choice_with_columns(tmp_path):
    write(
        tmp_path / "q.jsonl",
        [{"q": "2+2?", "a": "4", "b": 5, "right": "4"}, {"q": "1+1?", "a": "3", "b": 2, "right": 1}],
    )
    (tmp_path / "q.toml").write_text(
        'train = "q.jsonl"\nprompt = "{q}"\noptions = [" {a}", " {b}"]\nlabel = "right"\nover = "answer"\n'
    )
    task, examples = only(tmp_path / "q.toml")
    assert examples == [Example("2+2?", (" 4", " 5"), 0), Example("1+1?", (" 3", " 2"), 1)]
    assert task.kind == "choice"


def test_toml_choice_from_a_list(tmp_path):
    write(tmp_path / "q.jsonl", [{"q": "2+2?", "all": [" 3", " 4", " 5"], "right": 1}])
    (tmp_path / "q.toml").write_text('train = "q.jsonl"\nprompt = "{q}"\noptions = "all"\nlabel = "right"\n')
    assert only(tmp_path / "q.toml")[1] == [Example("2+2?", (" 3", " 4", " 5"), 1)]


def test_toml_generation(tmp_path):
    write(tmp_path / "q.jsonl", [{"q": "{why}", "a": {"text": ["because", "for"]}}, {"q": "who", "a": {"text": ["I"]}}])
    (tmp_path / "q.toml").write_text(
        'train = "q.jsonl"\nprompt = "{{Q}} {q}\\nA:"\nanswer = " {a.text}\\n"\nmetric = "exact_match"\n'
    )
    task, examples = only(tmp_path / "q.toml")
    assert examples == [
        Example("{Q} {why}\nA:", (" because\n",), 0, ("because", "for"), None),
        Example("{Q} who\nA:", (" I\n",), 0, ("I",), None),
    ]
    assert (task.kind, task.metric.name, task.stop, task.fields) == ("generation", "exact_match", "\n", ("q", "a.text"))


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("prompt = ", "invalid TOML"),
        ('prompt = "x"', "train is missing"),
        ('train = "t.csv"', "prompt is missing"),
        ('train = "t.csv"\nprompt = "x"', "give either options and label, or answer"),
        ('train = "t.csv"\nprompt = "x"\noptions = ["a"]', "options need label"),
        ('train = "t.csv"\nprompt = "x"\noptions = []\nlabel = "l"', "not a list of texts"),
        ('train = "t.csv"\nprompt = "x"\noptions = ["a"]\nlabel = "l"\nlabels = [1, 2]', "2 labels for 1 options"),
        ('train = "t.csv"\nprompt = "x"\noptions = ["a", "b"]\nlabel = "l"\nlabels = [1, 1]', "has a value twice"),
        ('train = "t.csv"\nprompt = "x"\nanswer = "y"\nmax_new_tokens = 0', "max_new_tokens is for answer, and at"),
        ('train = "t.csv"\nprompt = "x"\nanswer = "y"\nmax_new_tokens = true', "max_new_tokens is True, expected int"),
        ('train = "t.csv"\npromt = "x"', "unknown key 'promt'; did you mean 'prompt'"),
        ('train = 3\nprompt = "x"', "train is 3, expected str"),
        ('train = "t.csv"\nprompt = "x"\nanswer = "y"\nmetric = "f_1"', "unknown metric 'f_1'; did you mean 'f1'"),
        ('train = "t.csv"\nprompt = "x"\nanswer = "y"\nmetric = "accuracy"', "metric accuracy is for options"),
        ('train = "t.csv"\nprompt = "x"\nanswer = "y"\nover = "options"', 'over = "options" needs options'),
        ('train = "t.csv"\nprompt = "x"\nanswer = "y"\nover = "reward"', "unknown value of over: 'reward'"),
        ('train = "t.csv"\nprompt = "x"\nanswer = "y"\nlabels = ["a"]', "labels is for options"),
        ('train = "t.csv"\nprompt = "{te"\nanswer = "y"', "has a lone '{'"),
        ('train = "t.csv"\nprompt = "x"\nanswer = "y}"', "has a lone '}'"),
    ],
)
def test_bad_toml(toml, message, tmp_path):
    (tmp_path / "t.toml").write_text(toml)
    with pytest.raises(ZeroBlockError, match=rf"t\.toml: .*{message}"):
        get(str(tmp_path / "t.toml"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("x,maybe", "unknown label 'maybe'; expected 'neg', 'pos'"),
        ("x", "column 'mood' is empty"),
    ],
)
def test_bad_row_of_a_toml_task(row, message, tmp_path):
    (tmp_path / "mood.toml").write_text(MOOD)
    (tmp_path / "mood.csv").write_text(f"text,mood\nfine,pos\n{row}\n")
    with pytest.raises(ZeroBlockError, match=rf"mood\.csv:3: {message}"):
        get(str(tmp_path / "mood.toml")).load()


def test_columns_of_any_name(tmp_path):
    (tmp_path / "t.toml").write_text('train = "t.csv"\nprompt = "{review text}, {a-b} {{x}}"\nanswer = " {c}"')
    (tmp_path / "t.csv").write_text("review text,a-b,c\nfine,2,yes\n")
    _, examples = only(tmp_path / "t.toml")
    assert examples[0].context == "fine, 2 {x}"


def test_a_long_field_of_a_csv(tmp_path):
    (tmp_path / "p.csv").write_text(f"prompt,completion\n{'long ' * 40_000},b\n")
    _, examples = only(tmp_path / "p.csv")
    assert len(examples[0].context) > 190_000


def test_template_column_that_is_not_there(tmp_path):
    (tmp_path / "mood.toml").write_text(MOOD.replace("{text}", "{txt}"))
    (tmp_path / "mood.csv").write_text("text,mood\nfine,pos\n")
    with pytest.raises(ZeroBlockError, match=r"mood\.csv:2: no column 'txt'; the row has: text, mood"):
        get(str(tmp_path / "mood.toml")).load()


def test_a_label_of_too_many_digits_is_one_line(tmp_path):
    (tmp_path / "t.csv").write_text("text,label\na,0\nb," + "9" * 5000 + "\n")
    (tmp_path / "t.toml").write_text('train = "t.csv"\nprompt = "{text}"\noptions = [" x", " y"]\nlabel = "label"\n')
    with pytest.raises(ZeroBlockError, match=r"t\.csv:3: unknown label '999"):
        get(str(tmp_path / "t.toml")).load()


def test_toml_that_python_cannot_hold(tmp_path):
    (tmp_path / "t.toml").write_text("max_new_tokens = " + "9" * 5000)
    with pytest.raises(ZeroBlockError, match=r"t\.toml: invalid TOML"):
        get(str(tmp_path / "t.toml"))


def test_the_old_name_of_over_is_accepted(tmp_path):
    (tmp_path / "t.csv").write_text("text,label\na,0\nb,1\n")
    text = 'train = "t.csv"\nprompt = "{text}"\noptions = [" x", " y"]\nlabel = "label"\n'
    (tmp_path / "t.toml").write_text(text + 'objective = "answer"\n')
    with pytest.warns(ZeroBlockWarning, match="is now called over"):
        assert get(str(tmp_path / "t.toml")).over == "answer"
    (tmp_path / "t.toml").write_text(text + 'objective = "answer"\nover = "answer"\n')
    with pytest.raises(ZeroBlockError, match="unknown key 'objective'"):
        get(str(tmp_path / "t.toml"))
