"""COPA: which of two sentences is the cause, or the effect, of a premise."""

from __future__ import annotations

from .data_row import DataRow
from .example import DataError, Example, join
from .source import Hub
from .split import Sizes
from .task import Task

CONJUNCTION = {"effect": " so ", "cause": " because "}


def _render(row: DataRow) -> Example:
    question = row.text("question")
    if question not in CONJUNCTION:
        raise DataError(f"unknown question {question!r}; expected 'cause' or 'effect'")
    conjunction = CONJUNCTION[question]
    premise = row.text("premise").strip(" ").removesuffix(".")
    choices = (_continued(row.text(name).strip(" ")) for name in ("choice1", "choice2"))
    context, options = join(premise + conjunction, choices)
    return Example(context, options, row.label(2), calibration=conjunction.strip(" "))


def _continued(choice: str) -> str:
    """Write a sentence as the continuation of another: its first word in lower case, unless it is "I"."""
    first, *rest = choice.split(" ")
    return " ".join([first if first == "I" else first.lower(), *rest])


COPA = Task(
    "copa",
    "Which of two sentences is the premise's cause or effect?",
    ("premise", "choice1", "choice2", "question", "label"),
    _render,
    Hub("copa", "super_glue", "copa"),
    over="answer",
    sizes=Sizes(dev=100),
)
