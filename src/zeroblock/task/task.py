"""The task: where its rows come from, how a row reads as an example, how it trains and is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ..errors import ZeroBlockError
from .encoding import Encoder, Tokenizer
from .example import DataError, Example
from .item import Row
from .metric import ACCURACY, Metric
from .source import HubRows, Part, Source
from .split import Sizes, Split


@dataclass(frozen=True)
class Task:
    """Examples, prompt, options and metric of one dataset.

    Args:
        name: as on the command line.
        summary: one line for the list of tasks.
        fields: the columns that a row must have.
        render: a row to its example.
        source: where the rows come from.
        objective: how it trains. ``"options"``: cross-entropy over the options, the logit of
            each the mean log-probability of its tokens. ``"answer"``: teacher-forced
            cross-entropy on the tokens of the right option alone.
        metric: how a prediction is measured.
        sizes: how many examples the protocol wants.
        stop: the text at which generation stops; None for the end-of-sequence token, which
            is then appended to every option.
        max_new_tokens: how much is generated at most.
    """

    name: str
    summary: str
    fields: tuple[str, ...]
    render: Callable[[Row], Example]
    source: Source
    objective: Literal["options", "answer"] = "options"
    metric: Metric = ACCURACY
    sizes: Sizes = field(default_factory=Sizes)
    stop: str | None = "\n"
    max_new_tokens: int = 50

    @property
    def kind(self) -> str:
        """``classification``, ``choice`` or ``generation``, in a word."""
        if self.metric.generates:
            return "generation"
        return "classification" if self.objective == "options" else "choice"

    def example(self, row: Row) -> Example:
        """Render one row; what is wrong with it is reported with file and line."""
        try:
            return replace(self.render(row), where=row.where)
        except DataError as error:
            raise ZeroBlockError(f"{row.where}: {error}") from error

    def rows(self, part: Part, data: str | Path | None = None) -> Sequence[Row]:
        """The rows of one part, in the order of the file.

        Args:
            part: ``"train"`` or ``"validation"``.
            data: a folder that holds ``NAME/train.jsonl`` and ``NAME/validation.jsonl``, or these
                two files themselves; None for the task's own place (the hub, for most).
        """
        rows = self.source(part, None if data is None else Path(data))
        if rows is None:
            raise ZeroBlockError(f"{self.name} has no {part} part")
        return rows

    def load(self, data: str | Path | None = None, *, seed: int = 0, sizes: Sizes | None = None) -> Splits:
        """Read, render and split the dataset.

        Args:
            data: see :meth:`rows`.
            seed: the data seed, of the permutation alone.
            sizes: how many examples; the task's own unless given.
        """
        train = self.rows("train", data)
        validation = self.source("validation", None if data is None else Path(data))
        found = Split.of(len(train), None if validation is None else len(validation), sizes or self.sizes, seed)
        here = self._rendered(train)
        there = here if validation is None else self._rendered(validation)
        return Splits(
            tuple(map(here, found.train)), tuple(map(here, found.dev)), tuple(map(there, found.test)), found.note
        )

    def _rendered(self, rows: Sequence[Row]) -> Callable[[int], Example]:
        if isinstance(rows, HubRows):
            return lambda i: self.example(rows[i])
        # Files are rendered whole, so that a bad row is found whatever the seed.
        return [self.example(row) for row in rows].__getitem__

    def encoder(self, tokenizer: Tokenizer, max_length: int = 2048) -> Encoder:
        """The encoder of this task's examples: see :class:`Encoder`."""
        return Encoder.of(tokenizer, max_length, eos=self.stop is None)


@dataclass(frozen=True)
class Splits:
    """The examples of a task.

    Args:
        train: to train on.
        dev: to choose the step and the learning rate by.
        test: to report on.
        note: in which way they are fewer than the protocol wants; empty where they are not.
    """

    train: tuple[Example, ...]
    dev: tuple[Example, ...]
    test: tuple[Example, ...]
    note: str = ""
