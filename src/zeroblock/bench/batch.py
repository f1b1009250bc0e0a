"""Batches: every variant is measured on the same examples in the same order."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..engine.objective import Over
from ..engine.pack import pack
from ..errors import ZeroBlockError
from ..task import Encoded, Task
from ..task.encoding import Tokenizer

PADDED_TO_TOKENS = 8
"""MeZO's collator pads to a multiple of this many tokens."""


@dataclass(frozen=True)
class Batch:
    """Encoded examples, and how they are scored.

    Args:
        encoded: contexts with the options that branch off them.
        labels: index of the right option of each.
        over: cross-entropy over the options, or teacher forcing on the right one.
    """

    encoded: tuple[Encoded, ...]
    labels: tuple[int, ...]
    over: Over

    @property
    def scored(self) -> tuple[Encoded, ...]:
        """The examples with the options that are scored: all of them, or the right one alone."""
        if self.over == "options":
            return self.encoded
        return tuple(one.only(k) for one, k in zip(self.encoded, self.labels, strict=True))

    @property
    def rows(self) -> list[tuple[tuple[int, ...], int]]:
        """The rows that the published code runs: token ids per option, with the number of the option's tokens."""
        return [row for one in self.scored for row in one.rows]

    @property
    def tokens(self) -> int:
        """Number of tokens, packed: what texts share counts once, and a token that predicts nothing does not count."""
        return len(pack(self.scored).tokens)

    @property
    def padded(self) -> int:
        """Number of tokens, padded: a row per option, each as long as the longest, rounded up to a multiple of 8."""
        rows = self.rows
        return len(rows) * width(len(ids) for ids, _ in rows)

    @property
    def positions(self) -> int:
        """Number of packed positions whose logits are needed."""
        return len(pack(self.scored).keep)


@dataclass(frozen=True)
class Load:
    """Sizes of a batch, averaged over several.

    Args:
        tokens: number of tokens, packed.
        padded: number of tokens, padded to a row per option.
        positions: number of packed positions whose logits are needed.
    """

    tokens: int
    padded: int
    positions: int

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> Load:
        sizes = zip(*((b.tokens, b.padded, b.positions) for b in batches), strict=True)
        return cls(*(round(sum(size) / len(batches)) for size in sizes))


def width(lengths: Iterable[int]) -> int:
    """Number of columns of a padded batch.

    >>> width([9, 17])
    24
    """
    return -(-max(lengths) // PADDED_TO_TOKENS) * PADDED_TO_TOKENS


@dataclass(frozen=True)
class Pool:
    """The examples of a task, dealt out in order, and again from the start when they run out.

    Args:
        encoded: every example.
        labels: index of the right option of each.
        over: see :class:`Batch`.
    """

    encoded: tuple[Encoded, ...]
    labels: tuple[int, ...]
    over: Over

    def __post_init__(self) -> None:
        if not self.encoded:
            raise ZeroBlockError("there are no examples to measure on")

    def batch(self, step: int, size: int) -> Batch:
        """The batch of a step; it depends only on the number of the step."""
        chosen = [(step * size + i) % len(self.encoded) for i in range(size)]
        return Batch(tuple(self.encoded[i] for i in chosen), tuple(self.labels[i] for i in chosen), self.over)

    def folded(self, vocabulary: int) -> Pool:
        """The same examples with the ids of another tokenizer taken modulo the size of the model's vocabulary."""

        def fold(ids: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(i % vocabulary for i in ids)

        encoded = (
            replace(one, context=fold(one.context), options=tuple(map(fold, one.options))) for one in self.encoded
        )
        return replace(self, encoded=tuple(encoded))

    def begun(self, token: int) -> Pool:
        """The same examples, each beginning with a token, unless all of them do already."""
        if all(one.context[0] == token for one in self.encoded):
            return self
        return replace(self, encoded=tuple(replace(one, context=(token, *one.context)) for one in self.encoded))

    @property
    def longest(self) -> int:
        """Number of tokens of the longest row."""
        return max(len(ids) for one in self.encoded for ids, _ in one.rows)


def encode(
    task: Task,
    data: Path | None,
    tokenizer: Tokenizer,
    *,
    seed: int = 0,
    limit: int | None = None,
    max_length: int = 2048,
    **reads: bool,
) -> Pool:
    """Encode the training examples of a task, in the protocol's order.

    Args:
        task: the task.
        data: see :meth:`Task.rows`.
        tokenizer: the model's tokenizer, or a stand-in of similar granularity.
        seed: the data seed.
        limit: maximum number of examples.
        max_length: longer contexts are cut on the left.
        reads: options for the way the model reads examples, see :meth:`Task.encoder`.
    """
    encoder = task.encoder(tokenizer, max_length, **reads)
    examples = task.load(data, seed=seed).train[:limit]
    pairs = [task.training_pair(encoder, example) for example in examples]
    return Pool(tuple(one for one, _ in pairs), tuple(label for _, label in pairs), task.over)


def write(path: Path, pool: Pool) -> None:
    """Write one JSON object per line: context, options and label, as token ids."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for one, label in zip(pool.encoded, pool.labels, strict=True):
            file.write(json.dumps({"context": one.context, "options": one.options, "label": label}) + "\n")


def read(path: Path, over: Over) -> Pool:
    """Read a file that :func:`write` wrote."""
    if not path.is_file():
        raise ZeroBlockError(f"no file {str(path)!r}; write it with: zeroblock bench encode")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ZeroBlockError(f"{path} is not UTF-8; write it with: zeroblock bench encode") from error
    encoded, labels = [], []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            one = Encoded(tuple(map(int, row["context"])), tuple(tuple(map(int, o)) for o in row["options"]))
            label = int(row["label"])
        except (ValueError, TypeError, KeyError) as error:
            raise ZeroBlockError(f"{path}:{number}: needs context, options and label as token ids ({error})") from error
        if not one.context or not all(one.options) or not 0 <= label < len(one.options):
            raise ZeroBlockError(
                f"{path}:{number}: needs a context, options that are not empty, and the index of one as label"
            )
        encoded.append(one)
        labels.append(label)
    return Pool(tuple(encoded), tuple(labels), over)
