"""The example: a context, the options that may follow it, and which of them are right.

This one object serves classification, multiple choice and generation.  A classification has
the same options in every example, and a multiple choice has different ones.  A generation has
one option, the answer to train on, and the gold ``answers`` to compare a generated text with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..errors import ZeroBlockError


class DataError(ZeroBlockError):
    """An error in a row; the caller that knows the row adds file and line."""


@dataclass(frozen=True)
class Example:
    """One context with its options.

    Args:
        context: the prompt, up to and without the option.
        options: the texts that may follow the context, with their leading spaces;
            ``context + option`` is the text the model reads.
        label: index of the right option; a tuple of indices if several are right.
        answers: gold answers of a generated text; empty unless the task generates.
        calibration: the context of surface-form calibration (SFC), to which the same
            options are appended; None if the task has none.
        where: the row it was read from, ``file:line``; error messages begin with it.
        spans: ranges of characters of the context that carry loss too, in order: the earlier answers of a chat.
            Only an example of one option has them.
        gap: the texts before and after the gap that a masked language model fills in with an option; None for the
            context before it and a full stop after it.

    >>> Example("dull plot. It was", (" terrible", " great"), 0).target
    ' terrible'
    """

    context: str
    options: tuple[str, ...]
    label: int | tuple[int, ...]
    answers: tuple[str, ...] = ()
    calibration: str | None = ""
    where: str = field(default="", compare=False)
    spans: tuple[tuple[int, int], ...] = ()
    gap: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if not self.options:
            raise DataError("there are no options")
        for number, option in enumerate(self.options, start=1):
            if not option.strip():
                raise DataError(f"option {number} of {len(self.options)} is empty")
        if not self.right:
            raise DataError("no option is right")
        for index in self.right:
            if not 0 <= index < len(self.options):
                raise DataError(f"unknown label {index}; expected 0 to {len(self.options) - 1}")
        if self.spans and len(self.options) > 1:
            raise DataError("earlier answers and several options do not go together")

    @property
    def right(self) -> tuple[int, ...]:
        """Indices of the right options."""
        return self.label if isinstance(self.label, tuple) else (self.label,)

    @property
    def target(self) -> str:
        """The option to train on: the first of the right ones."""
        return self.options[self.right[0]]

    def after(self, text: str) -> Example:
        """The same example with a text before its context."""
        shift = len(text)
        spans = tuple((begin + shift, end + shift) for begin, end in self.spans)
        gap = None if self.gap is None else (text + self.gap[0], self.gap[1])
        return replace(self, context=text + self.context, spans=spans, gap=gap)


def join(prompt: str, options: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """Make the context and options of a prompt: spaces, but not newlines, are stripped at the ends.

    The spaces at the end of a prompt move to its options.  So the concatenation stays the
    same, and a byte-level tokenizer sees the word with its leading space.

    >>> join("It rained so ", ["the street was wet. "])
    ('It rained so', (' the street was wet.',))
    """
    context = prompt.strip(" ")
    gap = prompt[len(prompt.rstrip(" ")) :] if context else ""
    return context, tuple((gap + option).rstrip(" ") for option in options)
