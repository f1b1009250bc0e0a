"""The task: the source of its rows, how a row becomes an example, the training loss and the metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..errors import ZeroBlockError
from .data_row import DataRow
from .encoding import Cloze, Encoded, Encoder, Tokenizer
from .example import DataError, Example
from .metric import ACCURACY, Metric
from .seq2seq import Seq2Seq
from .source import Part, Source
from .split import Sizes, Split
from .table import TableRows, tables_of


@dataclass(frozen=True)
class Task:
    """Examples, prompt, options and metric of one dataset.

    Args:
        name: the name on the command line.
        summary: one line for the list of tasks.
        fields: the columns that a row must have.
        render: turns a row into an example.
        source: reads the rows.
        over: the training loss. ``"options"``: cross-entropy over the options,
            with the mean log-probability of an option's tokens as its logit. ``"answer"``:
            teacher-forced cross-entropy on the tokens of the right option alone.
        metric: scores a prediction.
        sizes: the protocol's number of examples in each split.
        stop: the text at which generation stops; None for the end-of-sequence token, which
            is then appended to every option.
        max_new_tokens: the maximum number of tokens to generate.
    """

    name: str
    summary: str
    fields: tuple[str, ...]
    render: Callable[[DataRow], Example]
    source: Source
    over: Literal["options", "answer"] = "options"
    metric: Metric = ACCURACY
    sizes: Sizes = field(default_factory=Sizes)
    stop: str | None = "\n"
    max_new_tokens: int = 50

    @property
    def kind(self) -> str:
        """``classification``, ``choice`` or ``generation``."""
        if self.metric.generates or self.metric.of_loss:
            return "generation"
        return "classification" if self.over == "options" else "choice"

    def example(self, row: DataRow) -> Example:
        """Render one row; an error names its file and line."""
        try:
            return replace(self.render(row), where=row.where)
        except DataError as error:
            raise ZeroBlockError(f"{row.where}: {error}") from error

    def rows(self, part: Part, data: Any = None) -> Sequence[DataRow]:
        """Read the rows of one part, in the order of the file.

        Args:
            part: ``"train"`` or ``"validation"``.
            data: a folder that holds ``NAME/train.jsonl`` and ``NAME/validation.jsonl``, or these
                two files themselves; a ``datasets.Dataset`` or ``DatasetDict``; None for the task's own
                source (mostly the hub).
        """
        rows = self._read(part, data)
        if rows is None:
            raise ZeroBlockError(f"{self.name} has no {part} part")
        return rows

    def _read(self, part: Part, data: Any) -> Sequence[DataRow] | None:
        if data is None or isinstance(data, (str, Path)):
            return self.source(part, None if data is None else Path(data))
        return tables_of(data)(part, None)

    def load(self, data: Any = None, *, seed: int = 0, sizes: Sizes | None = None) -> Splits:
        """Read, render and split the dataset.

        Args:
            data: see :meth:`rows`.
            seed: the data seed, which affects only the permutation.
            sizes: the number of examples in each split; by default the task's own.
        """
        train = self.rows("train", data)
        validation = self._read("validation", data)
        split = Split.of(len(train), None if validation is None else len(validation), sizes or self.sizes, seed)
        trained = self._rendered(train)
        tested = trained if validation is None else self._rendered(validation)
        return Splits(
            tuple(map(trained, split.train)), tuple(map(trained, split.dev)), tuple(map(tested, split.test)), split.note
        )

    def _rendered(self, rows: Sequence[DataRow]) -> Callable[[int], Example]:
        if isinstance(rows, TableRows):
            return lambda i: self.example(rows[i])
        # Files are rendered whole, so that a bad row is reported whatever the seed.
        return [self.example(row) for row in rows].__getitem__

    def encoder(
        self, tokenizer: Tokenizer, max_length: int = 2048, *, masked: bool = False, seq2seq: bool = False
    ) -> Encoder:
        """Make the encoder of this task's examples; see :class:`Encoder`.

        Args:
            tokenizer: the model's tokenizer.
            max_length: the maximum number of tokens in an example.
            masked: whether the model is a masked language model, for which :class:`Cloze` encodes.
            seq2seq: whether the model is an encoder-decoder, for which :class:`Seq2Seq` encodes.
        """
        kind = Cloze if masked else Seq2Seq if seq2seq else Encoder
        return kind.of(tokenizer, max_length, eos=self.stop is None)

    def training_pair(self, encoder: Encoder, example: Example) -> tuple[Encoded, int]:
        """Encode an example for the training loss, and return the index of its right option.

        The result has all options if the loss is over the options, else only the one to train on.

        Args:
            encoder: this task's encoder.
            example: the example to encode.
        """
        if self.over == "options":
            return encoder.example(example), example.right[0]
        return encoder.target(example), 0


@dataclass(frozen=True)
class Splits:
    """The examples of a task.

    Args:
        train: training examples.
        dev: examples to choose the step and the learning rate.
        test: examples for the reported result.
        note: says if there are fewer than the protocol takes, or if test is held out of train; else empty.
    """

    train: tuple[Example, ...]
    dev: tuple[Example, ...]
    test: tuple[Example, ...]
    note: str = ""
