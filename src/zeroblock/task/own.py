"""The user's own data as a task.

**Rows** in one of the layouts of :mod:`zeroblock.task.layout`, which are recognized by their columns::

    {"prompt": "English: cat\\nFrench:", "completion": " chat"}
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}
    {"instruction": "Translate into French.", "input": "cat", "output": "chat"}

They come from

- a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, or a folder with ``train`` and, if there is
  one, ``validation`` in one of these formats;
- a dataset of the hub, ``hf:user/name``, followed by settings and column names where needed:
  ``hf:openai/gsm8k,config=main,prompt=question,completion=answer``;
- a folder written by ``save_to_disk`` of the package ``datasets``;
- a ``datasets.Dataset``, a ``DatasetDict`` or a list of rows, in Python.

**A TOML file** that names other columns, a template and options: see :mod:`zeroblock.task.description`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ZeroBlockError, unknown
from .data_row import DataRow
from .description import read_description
from .example import DataError
from .layout import COLUMNS, Ending, Layout, Turns, Writer, recognize, warn_plain
from .metric import F1, LIKELIHOOD, METRICS, Metric
from .reader import READERS
from .source import Files, Source
from .split import ALL
from .table import SCHEME, HubName, is_saved, load_saved, tables_of
from .task import Task

SUFFIXES = (".toml", *READERS)
SHORT_WORDS = 5
"""Maximum words of a short answer; F1 and exact match mean little for longer ones."""
SHORT_SHARE = 0.9
"""A task with at least this share of short answers is measured by F1."""
MAX_LOOKED_AT = 1000
"""Maximum rows of a table that are read to find that share; all rows of a file are."""


def is_path(name: str) -> bool:
    """Whether a task's name means a file or folder of the user."""
    return not is_hub(name) and (name.endswith(SUFFIXES) or "/" in name or Path(name).exists())


def is_hub(name: str) -> bool:
    """Whether a task's name means a dataset of the hub."""
    return name.startswith(SCHEME)


def located(name: str) -> str:
    """The name of a user's data with absolute paths, so that it means the same in every folder."""
    if not is_hub(name):
        return str(Path(name).expanduser().resolve())
    path, *settings = name.removeprefix(SCHEME).split(",")
    if path.startswith((".", "/", "~")) and Path(path).expanduser().exists():
        path = str(Path(path).expanduser().resolve())
    return SCHEME + ",".join([path, *settings])


def open_task(
    data: Any,
    tokenizer: Any = None,
    *,
    turns: Turns = "all",
    ending: Ending = "eos",
    metric: str | None = None,
) -> Task:
    """Open the user's own data as a task.

    Args:
        data: a path, a dataset of the hub, or rows: see the module.
        tokenizer: its chat template formats chats; only chats need it.
        turns: the answers of a chat that carry loss: ``"all"``, or the ``"last"``.
        ending: the end of a completion: ``"eos"``, the end-of-sequence token, or ``"newline"``, which is ignored if
            some completion has several lines.  Chats end with their template's token.
        metric: ``"likelihood"``, ``"f1"`` or ``"exact_match"``; by default F1 if nine of ten answers have at
            most five words, else the likelihood, that is, the held-out loss.

    For example::

        task = open_task(datasets.load_dataset("user/name"), tokenizer)
        splits, encoder = task.load(), task.encoder(tokenizer)
    """
    for name, value, known in (("turns", turns, ("all", "last")), ("ending", ending, ("eos", "newline"))):
        if value not in known:
            raise unknown(name, str(value), known)
    if isinstance(data, (str, Path)):
        if not is_hub(str(data)) and Path(data).suffix == ".toml" and Path(data).is_file():
            if metric is not None:
                raise ZeroBlockError(f"name the metric in {data}: metric = {metric!r}")
            return read_description(Path(data))
        name, source = _source(str(data))
    else:
        source = tables_of(data)
        name = source.name
    return _task(name, source, tokenizer, turns, ending, metric)


def _source(data: str) -> tuple[str, Source]:
    """Find the name and the rows of a path or of a dataset of the hub."""
    if is_hub(data):
        tables = HubName.of(data, COLUMNS).load()
        return tables.name, tables
    path = Path(data).expanduser()
    if not path.exists():
        raise ZeroBlockError(f"no task file {path}")
    if path.is_dir():
        return path.resolve().name, load_saved(path) if is_saved(path) else _folder(path)
    if path.suffix not in SUFFIXES:
        raise ZeroBlockError(f"cannot tell what {path} is: expected {', '.join(SUFFIXES)}")
    return path.stem, Files(path.parent, path.name)


def _folder(path: Path) -> Files:
    found = {part: [f"{part}{suffix}" for suffix in READERS if (path / f"{part}{suffix}").is_file()] for part in PARTS}
    for files in found.values():
        if len(files) > 1:
            raise ZeroBlockError(f"{path} has {files[0]} and {files[1]}: remove one")
    if not found["train"]:
        *some, last = (f"train{suffix}" for suffix in READERS)
        raise ZeroBlockError(f"no {', '.join(some)} or {last} in {path}")
    return Files(path, found["train"][0], next(iter(found["validation"]), None))


PARTS = ("train", "validation")


def _task(name: str, source: Source, tokenizer: Any, turns: Turns, ending: Ending, metric: str | None) -> Task:
    rows = source("train", None)
    if not rows:
        raise ZeroBlockError(f"no rows in {source}")
    layout = recognize(rows[0])
    stop = None
    if ending == "newline" and not layout.chat:
        every = [*rows, *(source("validation", None) or ())]
        stop = None if any("\n" in _answer(layout, row).rstrip("\n") for row in every) else "\n"
    writer = Writer(tokenizer, turns, stop)
    if layout.chat and not writer.templated:
        warn_plain(tokenizer)
    return Task(
        name,
        f"{layout.name} ({', '.join(layout.columns)}) of {source}",
        layout.columns,
        lambda row: layout.render(row, writer),
        source,
        over="answer",
        metric=_metric(metric, layout, rows),
        sizes=ALL,
        stop=stop,
    )


def _metric(name: str | None, layout: Layout, rows: Sequence[DataRow]) -> Metric:
    """Choose the metric by the length of the answers, unless it is named."""
    if name is not None:
        if name not in METRICS:
            raise unknown("metric", name, METRICS)
        if not METRICS[name].generates and not METRICS[name].of_loss:
            raise ZeroBlockError(f"metric {name} is for tasks with options: describe them in a TOML file")
        return METRICS[name]
    some = rows if isinstance(rows, list) else rows[:MAX_LOOKED_AT]
    short = sum(len(_answer(layout, row).split()) <= SHORT_WORDS for row in some)
    return F1 if short >= SHORT_SHARE * len(some) else LIKELIHOOD


def _answer(layout: Layout, row: DataRow) -> str:
    """The answer of a row; empty for a malformed row, which is reported when it is rendered."""
    try:
        return layout.answer(row)
    except DataError:
        return ""
