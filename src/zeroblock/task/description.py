"""Tasks described in a TOML file: the columns, a template and the options.

A classification task::

    train = "train.csv"                 # relative to this file; or a dataset of the hub: "hf:user/name"
    validation = "test.csv"             # optional: without it, up to a fifth of train is held out for test
    prompt = "{text} It was"            # {text} is the column text; {a.b} the field b of column a; {{ a brace
    options = [" terrible", " great"]   # may hold {columns} too; or the name of a column that holds a list
    label = "sentiment"                 # the column that names the right option
    labels = ["neg", "pos"]             # its values, in the order of options; not needed for 0, 1, … or the options

and a generation task::

    train = "train.jsonl"
    prompt = "Question: {question}\\nAnswer:"
    answer = " {reply}"                 # if reply is a list, the first is the target and all are right

An answer ends with the end-of-sequence token, or with a newline if its template ends with one.
Both kinds may have ``name``, ``summary``, ``over`` (the training loss, ``"options"`` or ``"answer"``),
``metric`` (``"accuracy"``; ``"f1"``, ``"exact_match"`` or ``"likelihood"`` for answers),
``max_new_tokens`` (50, for answers) and ``calibration`` (the context of SFC).
"""

from __future__ import annotations

import re
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..errors import ZeroBlockError, ZeroBlockWarning, unknown
from .data_row import DataRow
from .example import DataError, Example, join
from .metric import ACCURACY, METRICS
from .source import Files, Source
from .split import ALL
from .table import SCHEME, HubName
from .task import Task

_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")

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


def read_description(path: Path) -> Task:
    """Read the task that a TOML file describes.

    Args:
        path: the TOML file; paths in it are relative to its folder.
    """
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
    """Accept ``objective``, the name of ``over`` until 0.1."""
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
    if (metric.generates or metric.of_loss) != generates:
        raise ZeroBlockError(f"metric {metric.name} is for {'options' if generates else 'answer'}")
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
        _source(path.parent, given),
        over=over,
        metric=metric if generates else ACCURACY,
        sizes=ALL,
        stop=_stop(given),
        max_new_tokens=given.get("max_new_tokens", 50),
    )


def _source(folder: Path, given: Mapping[str, Any]) -> Source:
    if not given["train"].startswith(SCHEME):
        return Files(folder, given["train"], given.get("validation"))
    if "validation" in given:
        raise ZeroBlockError(f'take the validation rows from the hub too: train = "{given["train"]},validation=NAME"')
    return HubName.of(given["train"], ()).load()


def _stop(given: Mapping[str, Any]) -> str | None:
    """Return the text at which answers stop: a newline if the template has newlines only at its end, else None."""
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
    """Return the index of the option that a column's value names: by label, by index, or by the option's text."""
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
        template: the text; ``{{`` and ``}}`` stand for braces.
        row: the values by column.
        given: values that override the row's.

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
