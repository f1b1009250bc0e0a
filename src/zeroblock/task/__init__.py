"""Tasks: the data that a model is fine-tuned and measured on.

A :class:`Task` has examples, a prompt, options and a metric.  The eleven tasks of the paper
are read from the hub or from a local folder of JSONL; ``reviews`` needs no hub; and the
user's own data are a task too, from files, from the hub or from ``datasets`` (see
:mod:`zeroblock.task.own`).

>>> sorted(TASKS)
['boolq', 'cb', 'copa', 'drop', 'multirc', 'record', 'reviews', 'rte', 'squad', 'sst2', 'wic', 'wsc']

    splits = zeroblock.task.get("sst2").load("data", seed=0)     # data/sst2/train.jsonl, …/validation.jsonl
    encoder = zeroblock.task.get("sst2").encoder(tokenizer)
    encoded = encoder.example(splits.train[0])                   # ids of the context and of each option
"""

from __future__ import annotations

import warnings
from typing import Any

from ..errors import ZeroBlockWarning, unknown
from .copa import COPA
from .data_row import DataRow
from .encoding import Encoded, Encoder, Tokenizer
from .example import DataError, Example
from .metric import METRICS, Metric, accuracy, exact_match, f1, likelihood
from .own import is_hub, is_path, open_task
from .question import BOOLQ, CB, MULTIRC, RTE, WIC, WSC
from .reading import DROP, SQUAD
from .record_task import RECORD
from .sentiment import REVIEWS, SST2
from .split import Sizes, Split
from .task import Splits, Task

__all__ = [
    "METRICS",
    "TASKS",
    "DataError",
    "DataRow",
    "Encoded",
    "Encoder",
    "Example",
    "Metric",
    "Sizes",
    "Split",
    "Splits",
    "Task",
    "Tokenizer",
    "accuracy",
    "exact_match",
    "f1",
    "get",
    "is_rows",
    "likelihood",
    "open_task",
]

TASKS: dict[str, Task] = {
    task.name: task for task in (REVIEWS, SST2, RTE, CB, BOOLQ, WSC, WIC, MULTIRC, COPA, RECORD, SQUAD, DROP)
}


def get(name: Any, tokenizer: Any = None, **choices: Any) -> Task:
    """Get a task by its name, or the user's own data as a task.

    Args:
        name: one of :data:`TASKS`, or own data: a path, ``hf:user/name``, or rows (see :mod:`zeroblock.task.own`).
        tokenizer: its chat template formats chats; only a user's own chats need it.
        choices: how to read own data; see :func:`open_task`.
    """
    if not isinstance(name, str):
        return open_task(name, tokenizer, **choices)
    if name in TASKS:
        return TASKS[name]
    if is_path(name) or is_hub(name):
        return open_task(name, tokenizer, **choices)
    raise unknown("task", name, TASKS)


def is_rows(name: Any) -> bool:
    """Whether a name means own data in a recognized layout, to which ``turns``, ``ending`` and ``metric`` apply.

    >>> is_rows("mine.csv"), is_rows("hf:user/name"), is_rows("mine.toml"), is_rows("sst2")
    (True, True, False, False)
    """
    if not isinstance(name, str) or name in TASKS or name.endswith(".toml"):
        return False
    return is_hub(name) or is_path(name)


def __getattr__(name: str) -> Any:
    """Accept ``Row``, the name of ``DataRow`` until 0.1."""
    if name != "Row":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    message = "zeroblock.task.Row is now called DataRow; the old name works until 0.3"
    warnings.warn(message, ZeroBlockWarning, stacklevel=2)
    return DataRow
