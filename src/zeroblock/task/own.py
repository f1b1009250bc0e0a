"""The user's own data as a task.

**A file of examples**, JSONL or CSV (or a folder with ``train.jsonl`` and, if there
is one, ``validation.jsonl``; ``.csv`` too), one example per row, in one of two layouts::

    {"prompt": "English: cat\\nFrench:", "completion": " chat"}
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}

Prompt and completion are concatenated as they are written: a space between them must
be in one of the two.  Completions of one line end in a newline, as in SQuAD; longer
ones, and chats, end in the end-of-sequence token.  The training target of a chat is its last
message, which is the assistant's.  The tokenizer's chat template formats the chat; without a
template it becomes ``User: …`` and ``Assistant: …`` lines.

**A TOML file** that names the columns, a template and the options.  A classification::

    train = "train.csv"                 # JSONL or CSV, relative to this file
    validation = "test.csv"             # optional: without it, up to a fifth of train is held out for test
    prompt = "{text} It was"            # {text} is the column text; {a.b} the field b of column a; {{ a brace
    options = [" terrible", " great"]   # may hold {columns} too; or the name of a column that holds a list
    label = "sentiment"                 # the column that names the right option
    labels = ["neg", "pos"]             # its values, in the order of options; not needed for 0, 1, … or the options

and a generation::

    train = "train.jsonl"
    prompt = "Question: {question}\\nAnswer:"
    answer = " {reply}\\n"               # if reply is a list, the first is the target and all are right

and, optionally in both, ``name``, ``summary``, ``over`` (``"options"`` or ``"answer"``: what the
training loss is computed over), ``metric`` (``"accuracy"``; ``"f1"`` or ``"exact_match"`` to generate),
``max_new_tokens`` (50, to generate) and ``calibration`` (the context of SFC).
"""

from __future__ import annotations

import re
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import ZeroBlockError, ZeroBlockWarning, unknown
from .data_row import DataRow, read_rows
from .example import DataError, Example, join
from .metric import ACCURACY, F1, METRICS
from .source import Part
from .split import Sizes
from .task import Task

SUFFIXES = (".toml", ".jsonl", ".json", ".csv")
SIZES = Sizes(train=None)  # all of the user's rows

_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")


def is_path(name: str) -> bool:
    """Whether a task's name means a file or folder of the user's."""
    return name.endswith(SUFFIXES) or "/" in name or Path(name).exists()


def open_task(path: str | Path, tokenizer: Any = None) -> Task:
    """Open the task of a TOML file, of a file of examples, or of a folder of them.

    Args:
        path: see the module.
        tokenizer: its template writes chats; only chats need it.
    """
    path = Path(path)
    if not path.exists():
        raise ZeroBlockError(f"no task file {path}")
    if path.suffix == ".toml":
        return _from_toml(path)
    if path.is_dir():
        train = [p for p in (path / f"train{suffix}" for suffix in (".jsonl", ".csv")) if p.is_file()]
        if not train:
            raise ZeroBlockError(f"no train.jsonl or train.csv in {path}")
        validation = [p for p in (path / f"validation{suffix}" for suffix in (".jsonl", ".csv")) if p.is_file()]
        for both in (train, validation):
            if len(both) > 1:
                raise ZeroBlockError(f"{path} has {both[0].name} and {both[1].name}: remove one")
        return _from_rows(path.resolve().name, train[0], validation[0] if validation else None, tokenizer)
    if path.suffix not in SUFFIXES:
        raise ZeroBlockError(f"cannot tell what {path} is: expected {', '.join(SUFFIXES)}")
    return _from_rows(path.stem, path, None, tokenizer)


@dataclass(frozen=True)
class Files:
    """Two files as a source, in the folder that the user gives, if any.

    Args:
        folder: what the names are relative to by default.
        train: name of the file to train on.
        validation: name of the file to test on; None to hold rows out.
    """

    folder: Path
    train: str
    validation: str | None = None

    def __str__(self) -> str:
        return str(self.folder / self.train)

    def __call__(self, part: Part, data: Path | None) -> list[DataRow] | None:
        name = self.train if part == "train" else self.validation
        return None if name is None else read_rows((data or self.folder) / name)


# ---------------------------------------------------------------------------------------------------------------------
# Prompt and completion, and chats


def _from_rows(name: str, train: Path, validation: Path | None, tokenizer: Any) -> Task:
    source = Files(train.parent, train.name, validation.name if validation else None)
    rows = read_rows(train)
    first = rows[0]
    if "messages" in first.fields:
        fields: tuple[str, ...] = ("messages",)
        stop = None
        render = _chat(tokenizer)
    elif "prompt" in first.fields and "completion" in first.fields:
        fields = ("prompt", "completion")
        every = rows + (read_rows(validation) if validation else [])
        stop = None if any("\n" in str(row.fields.get("completion")).rstrip("\n") for row in every) else "\n"
        render = _completion(stop)
    else:
        raise ZeroBlockError(
            f"{first.where}: expected the columns prompt and completion, or messages; the row has: "
            f"{', '.join(map(str, first.fields))} (name others in a TOML file)"
        )
    summary = f"{' and '.join(fields)} of {train}"
    return Task(name, summary, fields, render, source, over="answer", metric=F1, sizes=SIZES, stop=stop)


def _completion(stop: str | None) -> Callable[[DataRow], Example]:
    def render(row: DataRow) -> Example:
        completion = row.text("completion")
        if not completion.strip():
            raise DataError("the completion is empty")
        prompt = row.text("prompt")
        context = prompt.rstrip(" ")  # the spaces it ends with are the completion's, for the tokenizer
        option = prompt[len(context) :] + completion.rstrip(" ")
        if stop is not None:
            option = option.rstrip("\n") + stop
        return Example(context, (option,), 0, (completion.strip(),), calibration=None)

    return render


def _chat(tokenizer: Any) -> Callable[[DataRow], Example]:
    template = getattr(tokenizer, "chat_template", None)

    def render(row: DataRow) -> Example:
        messages = row["messages"]
        if not isinstance(messages, list) or not messages:
            raise DataError("column 'messages' holds no list of messages")
        for number, message in enumerate(messages, start=1):
            for key in ("role", "content"):
                if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                    raise DataError(f"message {number} has no text in {key!r}")
        last = messages[-1]
        if last["role"] != "assistant" or not last["content"].strip():
            raise DataError("the last message is not an answer of the assistant")
        context, option = _templated(tokenizer, messages) if template else _plain(messages)
        return Example(context, (option,), 0, (last["content"].strip(),), calibration=None)

    return render


def _templated(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    try:
        context = str(tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True))
        whole = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # a template is a program of the model's author, with errors of its own
        raise DataError(f"the chat template refuses these messages ({error})") from error
    if not whole.startswith(context):
        raise DataError("the chat template writes the conversation differently with its answer than without")
    return context, whole[len(context) :].rstrip("\n")


def _plain(messages: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    lines = [f"{message['role'].capitalize()}: {message['content'].strip()}" for message in messages]
    *before, last = lines
    head = "Assistant:"
    return "\n".join([*before, head]), last[len(head) :]


# ---------------------------------------------------------------------------------------------------------------------
# TOML

_KEYS: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "summary": (str,),
    "train": (str,),
    "validation": (str,),
    "prompt": (str,),
    "options": (list, str),
    "label": (str,),
    "labels": (list,),
    "answer": (str,),
    "over": (str,),
    "metric": (str,),
    "calibration": (str,),
    "max_new_tokens": (int,),
}


def _from_toml(path: Path) -> Task:
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ZeroBlockError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ZeroBlockError(f"{path}: invalid TOML ({error})") from error
    try:
        return _described(path, given)
    except ZeroBlockError as error:
        raise ZeroBlockError(f"{path}: {error}") from error


def _renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Accept the name that ``over`` had until 0.1."""
    if "objective" not in given or "over" in given:
        return dict(given)
    warnings.warn(
        "objective in a task's TOML is now called over; the old name works until 0.3", ZeroBlockWarning, stacklevel=2
    )
    return {("over" if key == "objective" else key): value for key, value in given.items()}


def _described(path: Path, given: dict[str, Any]) -> Task:
    given = _renamed(given)
    for key, value in given.items():
        if key not in _KEYS:
            raise unknown("key", key, _KEYS)
        if not isinstance(value, _KEYS[key]) or isinstance(value, bool):
            raise ZeroBlockError(f"{key} is {value!r}, expected {' or '.join(t.__name__ for t in _KEYS[key])}")
    for key in ("train", "prompt"):
        if key not in given:
            raise ZeroBlockError(f"{key} is missing")
    if ("answer" in given) == ("options" in given):
        raise ZeroBlockError("give either options and label, or answer")
    if "options" in given and "label" not in given:
        raise ZeroBlockError("options need label, the column that names the right option")
    generates = "answer" in given
    for key in ("label", "labels", "calibration"):
        if generates and key in given:
            raise ZeroBlockError(f"{key} is for options, and an answer has none: leave it out")
    if "max_new_tokens" in given and (not generates or given["max_new_tokens"] < 1):
        raise ZeroBlockError("max_new_tokens is for answer, and at least 1")
    metric_name = given.get("metric", "f1" if generates else "accuracy")
    if metric_name not in METRICS:
        raise unknown("metric", metric_name, METRICS)
    metric = METRICS[metric_name]
    if metric.generates != generates:
        raise ZeroBlockError(f"metric {metric.name} is for {'answer' if metric.generates else 'options'}")
    over: Literal["options", "answer"] = given.get("over", "answer" if generates else "options")
    if over not in ("options", "answer"):
        raise unknown("value of over:", over, ("options", "answer"))
    if generates and over == "options":
        raise ZeroBlockError('over = "options" needs options')
    templates = [given["prompt"], given.get("answer", "")]
    if isinstance(given.get("options"), list):
        if not given["options"] or not all(isinstance(option, str) for option in given["options"]):
            raise ZeroBlockError("options is not a list of texts")
        templates += given["options"]
        if "labels" in given and len(given["labels"]) != len(given["options"]):
            raise ZeroBlockError(f"{len(given['labels'])} labels for {len(given['options'])} options")
    if len(set(map(str, given.get("labels", ())))) < len(given.get("labels", ())):
        raise ZeroBlockError(f"labels has a value twice: {given['labels']}")
    for template in templates:
        if rest := set(_FIELD.sub("", template)) & set("{}"):
            raise ZeroBlockError(
                f"{template!r} has a lone {min(rest)!r}: columns are written {{column}}, a brace twice"
            )
    columns = [name for template in templates for name in _FIELD.findall(template) if name]
    columns += [given["options"]] if isinstance(given.get("options"), str) else []
    columns += [given["label"]] if "label" in given else []
    return Task(
        given.get("name", path.stem),
        given.get("summary", f"described in {path}"),
        tuple(dict.fromkeys(columns)),
        _generation(given) if generates else _choice(given),
        Files(path.parent, given["train"], given.get("validation")),
        over=over,
        metric=metric if generates else ACCURACY,
        sizes=SIZES,
        stop=_stop(given),
        max_new_tokens=given.get("max_new_tokens", 50),
    )


def _stop(given: Mapping[str, Any]) -> str | None:
    """Find the text at which answers stop: the newline at the template's end, unless it has others before."""
    template = given.get("answer", "\n")
    return "\n" if template.endswith("\n") and "\n" not in template.rstrip("\n") else None


def _choice(given: Mapping[str, Any]) -> Callable[[DataRow], Example]:
    def render(row: DataRow) -> Example:
        templates = given["options"]
        written = row.texts(templates) if isinstance(templates, str) else tuple(fill(t, row) for t in templates)
        context, options = join(fill(given["prompt"], row), written)
        label = _label(row[given["label"]], options, given.get("labels"))
        return Example(context, options, label, calibration=given.get("calibration", "").strip(" "))

    return render


def _label(value: Any, options: Sequence[str], labels: Sequence[Any] | None) -> int:
    """Find the index that a column's value means: one of the labels, an index, or the text of an option."""
    text = str(value).strip()
    known = [str(label) for label in labels] if labels is not None else [option.strip() for option in options]
    if text in known:
        return known.index(text)
    if labels is None and text.isdecimal() and len(text) < 10 and int(text) < len(options):
        return int(text)
    expected = ", ".join(map(repr, known)) + ("" if labels is not None else f", or 0 to {len(options) - 1}")
    raise DataError(f"unknown label {value!r}; expected {expected}")


def _generation(given: Mapping[str, Any]) -> Callable[[DataRow], Example]:
    def render(row: DataRow) -> Example:
        lists = {n: row.texts(n) for n in _FIELD.findall(given["answer"]) if n and isinstance(row[n], (list, tuple))}
        count = max(map(len, lists.values()), default=1)
        if any(len(values) != count for values in lists.values()) or count == 0:
            raise DataError("there are no answers" if count == 0 else "lists of answers of different lengths")
        written = [fill(given["answer"], row, {n: values[i] for n, values in lists.items()}) for i in range(count)]
        if _stop(given) is not None and any("\n" in text.rstrip("\n") for text in written):
            raise DataError(
                "an answer has several lines, but the newline at the template's end says that answers have one: "
                "leave the newline out of the template"
            )
        context, options = join(fill(given["prompt"], row), written[:1])
        return Example(context, options, 0, tuple(text.strip() for text in written), calibration=None)

    return render


def fill(template: str, row: DataRow, given: Mapping[str, str] | None = None) -> str:
    """Fill in the ``{column}``s of a template.

    Args:
        template: text; ``{{`` and ``}}`` stand for braces.
        row: has the columns.
        given: values that win over those of the row.

    >>> fill("{a} + {b} {{}}", DataRow({"a": "1", "b": 2}))
    '1 + 2 {}'
    """

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return match[0][0]
        if given is not None and name in given:
            return given[name]
        cell = row[name]
        # numbers read well in a sentence; lists and objects would appear in Python's notation
        return str(cell) if isinstance(cell, (int, float)) and not isinstance(cell, bool) else row.text(name)

    return _FIELD.sub(value, template)
