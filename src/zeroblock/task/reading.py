"""Answers generated from a passage: SQuAD and DROP."""

from __future__ import annotations

from .data_row import DataRow
from .example import DataError, Example
from .metric import F1
from .source import Hub
from .task import Task


def _example(context: str, answers: tuple[str, ...]) -> Example:
    if not answers:
        raise DataError("there are no answers")
    return Example(context.strip(" "), (f" {answers[0]}\n",), 0, answers, calibration=None)


def _squad(row: DataRow) -> Example:
    title, passage, question = row.text("title"), row.text("context"), row.text("question").strip(" ")
    return _example(f"Title: {title}\nContext: {passage}\nQuestion: {question}\nAnswer:", row.texts("answers.text"))


def _drop(row: DataRow) -> Example:
    passage, question = row.text("passage"), row.text("question").strip(" ")
    return _example(f"Passage: {passage}\nQuestion: {question}\nAnswer:", row.texts("answers_spans.spans"))


SQUAD = Task(
    "squad",
    "Answer a question with a span of a passage",
    ("title", "context", "question", "answers.text"),
    _squad,
    Hub("squad", "squad"),
    over="answer",
    metric=F1,
)
DROP = Task(
    "drop",
    "Answer a question that takes arithmetic over a passage",
    ("passage", "question", "answers_spans.spans"),
    _drop,
    Hub("drop", "drop"),
    over="answer",
    metric=F1,
)
