"""Sentiment of a sentence: SST-2, and the review sentences that need no hub."""

from __future__ import annotations

from .data_row import DataRow
from .example import Example
from .reviews import Reviews
from .source import Hub
from .split import Sizes
from .task import Task


def render(row: DataRow) -> Example:
    """``{sentence} It was`` → `` terrible`` / `` great``."""
    # every sentence of SST-2 ends with a space, and the template has one too
    context = f"{row.text('sentence').strip(' ')} It was".strip(" ")
    return Example(context, (" terrible", " great"), row.label(2), calibration="It was")


FIELDS = ("sentence", "label")

SST2 = Task("sst2", "Is a movie-review phrase negative or positive?", FIELDS, render, Hub("sst2", "glue", "sst2"))
REVIEWS = Task(
    "reviews",
    "The default: whole movie-review sentences, rated by people; needs no hub",
    FIELDS,
    render,
    Reviews(),
    sizes=Sizes(train=None),
)
