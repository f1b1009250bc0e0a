"""The example: a context, the options that may follow it, and which of them are right.

Classification, multiple choice and generation are all this one object.  They differ
in what they fill in: a classification has the same options in every example, a
multiple choice its own, a generation one option (the answer it is trained on) and
the gold ``answers`` that a generated text is compared with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..errors import ZeroBlockError


class DataError(ZeroBlockError):
    """What is wrong with a row; whoever knows the row's place adds file and line."""


@dataclass(frozen=True)
class Example:
    """One context with its options.

    Args:
        context: the prompt, up to and without the option.
        options: what may follow the context, each with its own leading space or none;
            ``context + option`` is the text the model reads.
        label: index of the right option; a tuple of indices where several are right.
        answers: gold answers of a generated text; empty unless the task generates.
        calibration: the context of surface-form calibration (SFC), to which the same
            options are appended; None where the task has none.
        where: the row it was read from, ``file:line``; errors begin with it.

    >>> Example("dull plot. It was", (" terrible", " great"), 0).target
    ' terrible'
    """

    context: str
    options: tuple[str, ...]
    label: int | tuple[int, ...]
    answers: tuple[str, ...] = ()
    calibration: str | None = ""
    where: str = field(default="", compare=False)

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

    @property
    def right(self) -> tuple[int, ...]:
        """Indices of the right options."""
        return self.label if isinstance(self.label, tuple) else (self.label,)

    @property
    def target(self) -> str:
        """The option to train on: the first of the right ones."""
        return self.options[self.right[0]]


def join(prompt: str, options: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """Context and options of a prompt: spaces, and never newlines, are stripped at the ends.

    The spaces a prompt ends with go over to its options, so that the concatenation is
    what was written and a byte-level tokenizer sees the word with its leading space.

    >>> join("It rained so ", ["the street was wet. "])
    ('It rained so', (' the street was wet.',))
    """
    context = prompt.strip(" ")
    gap = prompt[len(prompt.rstrip(" ")) :] if context else ""
    return context, tuple((gap + option).rstrip(" ") for option in options)
