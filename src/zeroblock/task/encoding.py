"""Encoding: from a context and its options to token ids, and which of them carry loss.

The tokens of ``context + option`` are those of the whole string, as the model saw
strings in its training.  The option's own are those that the string has more than
the context alone: with a tokenizer that never merges across the boundary, the
token-count difference between the two.  Where tokens do merge across it (``"wa" +
"s"`` is one token), that difference can be nought or negative; so the context ends
where the tokens of *all* the strings, with every option and without any, still agree.
Each option is then scored from there, with the same few characters of context in
each, which is a fair comparison, and every option has at least one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import ZeroBlockError
from .example import DataError, Example


class Tokenizer(Protocol):
    """What is asked of a tokenizer; every one of transformers' has it."""

    bos_token_id: Any
    eos_token_id: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True)
class Encoded:
    """Token ids of a context and of the options that branch off it.

    Args:
        context: ids that all options share, the first of them the BOS token where there is one.
        options: ids of each option: the positions that carry loss.
        cut: how many tokens of context were dropped on the left.
    """

    context: tuple[int, ...]
    options: tuple[tuple[int, ...], ...]
    cut: int = 0

    @property
    def rows(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """For each option the ids of the whole string, and how many of the last are the option's."""
        return tuple((self.context + option, len(option)) for option in self.options)


@dataclass(frozen=True)
class Encoder:
    """Encodes examples for one tokenizer; make it with :meth:`of`.

    Args:
        tokenizer: a tokenizer of transformers, or anything with its ``encode``.
        prefix: what it puts before a text: the BOS token, or nothing.
        max_length: the longest string of tokens, context and option together.
        eos: whether the end-of-sequence token is appended to every option.
    """

    tokenizer: Tokenizer
    prefix: tuple[int, ...]
    max_length: int = 2048
    eos: bool = False

    @classmethod
    def of(cls, tokenizer: Tokenizer, max_length: int = 2048, *, eos: bool = False) -> Encoder:
        """The encoder of a tokenizer.

        Args:
            tokenizer: see the class.
            max_length: see the class; pass the model's own where that is shorter.
            eos: see the class.
        """
        if max_length < 2:
            raise ZeroBlockError(f"a maximum length of {max_length} has no room for a context and an option")
        if eos and tokenizer.eos_token_id is None:
            raise ZeroBlockError("the tokenizer has no end-of-sequence token to end an answer with")
        return cls(tokenizer, _prefix(tokenizer), max_length, eos)

    def __call__(self, context: str, options: Sequence[str], *, reserve: int = 0) -> Encoded:
        """Encode a context with its options.

        A context that does not fit is cut on the left, the BOS token kept, so that the
        longest option still fits; the options go on sharing one context.

        Args:
            context: the text before the option.
            options: the texts that may follow it; none encodes the context alone.
            reserve: tokens to leave free at the end, for those to be generated.
        """
        alone = self._ids(context)
        whole = [self._ids(context + option) for option in options]
        for option, ids in zip(options, whole, strict=True):
            if ids == alone:
                raise DataError(f"the tokenizer has no tokens for the option {option!r}")
        shared = _agreement([alone, *whole])
        end = (int(self.tokenizer.eos_token_id),) if self.eos else ()
        tails = tuple(ids[shared:] + (end if ids[-1:] != end else ()) for ids in whole)
        prefix = () if alone[: len(self.prefix)] == self.prefix else self.prefix  # a chat template writes its own BOS
        kept = prefix + alone[:shared] or (self._anchor(),)
        longest = max(map(len, tails), default=0)
        room = self.max_length - reserve - longest
        if room < 1:
            wanted = f"{reserve} tokens to be generated" if reserve else f"an option of {longest} tokens"
            raise DataError(f"{wanted} in a maximum length of {self.max_length} leave no room for the context")
        cut = max(0, len(kept) - room)
        if cut:
            head = self.prefix if len(self.prefix) <= room else ()
            kept = head + kept[len(kept) - room + len(head) :]
        return Encoded(kept, tails, cut)

    def example(self, example: Example) -> Encoded:
        """An example with all its options: for cross-entropy over them, and for choosing one."""
        return self._of(example, example.context, example.options)

    def target(self, example: Example) -> Encoded:
        """An example with the option to train on alone: for teacher forcing."""
        return self._of(example, example.context, (example.target,))

    def prompt(self, example: Example, max_new_tokens: int) -> Encoded:
        """An example's context alone, with room for what is to be generated."""
        return self._of(example, example.context, (), max_new_tokens)

    def calibration(self, example: Example) -> Encoded | None:
        """The example's options after its calibration context (SFC); None where it has none."""
        return None if example.calibration is None else self._of(example, example.calibration, example.options)

    def _of(self, example: Example, context: str, options: Sequence[str], reserve: int = 0) -> Encoded:
        try:
            return self(context, options, reserve=reserve)
        except DataError as error:
            if not example.where:
                raise
            raise ZeroBlockError(f"{example.where}: {error}") from error

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False)) if text else ()

    def _anchor(self) -> int:
        """A token to stand for an empty context: an option's first token must be predicted from something."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise ZeroBlockError("the context is empty and the tokenizer has neither a BOS nor an EOS token to begin with")


def _agreement(strings: Sequence[tuple[int, ...]]) -> int:
    """How many tokens all strings begin with, leaving at least one to every string but the first."""
    most = min(len(ids) - (i > 0) for i, ids in enumerate(strings))
    first = strings[0]
    return next((k for k in range(most) if any(ids[k] != first[k] for ids in strings)), most)


def _prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the tokenizer puts before every text; what it may put after one is left out."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    marked = tokenizer.encode("a", add_special_tokens=True)
    starts = range(len(marked) - len(plain) + 1)
    return tuple(marked[: next((i for i in starts if marked[i : i + len(plain)] == plain), 0)])
