"""COPA: which of two sentences is the cause, or the effect, of a premise."""

from __future__ import annotations

from .example import DataError, Example, join
from .item import Row
from .source import Hub
from .split import Sizes
from .task import Task

CONJUNCTION = {"effect": " so ", "cause": " because "}


def _render(row: Row) -> Example:
    question = row.text("question")
    if question not in CONJUNCTION:
        raise DataError(f"unknown question {question!r}; expected 'cause' or 'effect'")
    conjunction = CONJUNCTION[question]
    premise = row.text("premise").strip(" ").removesuffix(".")
    choices = (_continued(row.text(name).strip(" ")) for name in ("choice1", "choice2"))
    context, options = join(premise + conjunction, choices)
    return Example(context, options, row.label(2), calibration=conjunction.strip(" "))


def _continued(choice: str) -> str:
    """A sentence as it reads in the middle of another: its first word in lower case, unless "I"."""
    first, *rest = choice.split(" ")
    return " ".join([first if first == "I" else first.lower(), *rest])


COPA = Task(
    "copa",
    "Which of two sentences is the premise's cause or effect?",
    ("premise", "choice1", "choice2", "question", "label"),
    _render,
    Hub("copa", "super_glue", "copa"),
    objective="answer",
    sizes=Sizes(dev=100),
)
