"""Sentiment of a sentence: SST-2, and the review sentences that need no hub."""

from __future__ import annotations

from .example import Example
from .item import Row
from .reviews import Reviews
from .source import Hub
from .split import Sizes
from .task import Task


def render(row: Row) -> Example:
    """``{sentence} It was`` → `` terrible`` / `` great``."""
    # SST-2 ends every sentence with a space, which would double the template's.
    context = f"{row.text('sentence').strip(' ')} It was".strip(" ")
    return Example(context, (" terrible", " great"), row.label(2), calibration="It was")


FIELDS = ("sentence", "label")

SST2 = Task("sst2", "Is a movie-review phrase negative or positive?", FIELDS, render, Hub("sst2", "glue", "sst2"))
REVIEWS = Task(
    "reviews",
    "The embedded default: whole movie-review sentences, rated by people",
    FIELDS,
    render,
    Reviews(),
    sizes=Sizes(train=None),
)
