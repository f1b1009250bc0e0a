"""ReCoRD: which entity of a news story fills the gap in a sentence about it."""

from __future__ import annotations

from .data_row import DataRow
from .example import DataError, Example
from .source import Hub
from .task import Task

GAP = "@placeholder"


def _render(row: DataRow) -> Example:
    query = row.text("query")
    if GAP not in query:
        raise DataError(f"the query has no {GAP}")
    entities, answers = row.texts("entities"), row.texts("answers")
    for number, entity in enumerate(entities, start=1):
        if not entity.strip():  # inside the sentence an empty option would go unnoticed
            raise DataError(f"option {number} of {len(entities)} is empty")
    for answer in answers:
        if answer not in entities:
            raise DataError(f"unknown label: the answer {answer!r} is not among the entities")
    context = row.text("passage").replace("@highlight\n", "- ") + "\n-"
    options = tuple(f" {query.replace(GAP, entity)}".rstrip(" ") for entity in entities)
    right = tuple(entities.index(answer) for answer in answers)
    return Example(context.strip(" "), options, right, calibration="-")


RECORD = Task(
    "record",
    "Which entity of a news story fills the gap?",
    ("passage", "query", "entities", "answers"),
    _render,
    Hub("record", "super_glue", "record"),
    over="answer",
)
