"""Encoding: from a context and its options to token ids, with marks on those that carry loss.

The whole string ``context + option`` is tokenized at once, as the model saw strings in its
training.  With a tokenizer that never merges across the boundary, the option's tokens are those
that follow the context's.  Where tokens merge across it (``"wa" + "s"`` is one token), there may
be no such tokens.  So the context ends where the tokens of *all* strings,
with every option and with none, still agree.  Each option is scored from there: all options
carry the same few characters of context, which makes the comparison fair, and every option has
at least one token.

A masked language model reads a text with a gap, ``{sentence} It was <mask>.``, and predicts the
word in it: a :class:`Cloze` encodes the text, and each option as the one token of its word.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..errors import ZeroBlockError
from .example import DataError, Example

FULL_STOP = "."
"""The text after a gap, unless an example gives another."""
NO_TEXT = (
    "a masked language model fills in single words and generates no text: choose a task of label words, such as sst2"
)


class Tokenizer(Protocol):
    """The part of a tokenizer that is used here; all tokenizers of transformers have it."""

    bos_token_id: Any
    eos_token_id: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True)
class Encoded:
    """Token ids of a context and of the options that branch off it.

    Args:
        context: ids that all options share, beginning with the BOS token if there is one.
        options: ids of each option: the positions that carry loss, unless ``scored`` says otherwise.
        cut: the number of context tokens dropped on the left.
        scored: for each option, which of its tokens carry loss; None if all do.  The model reads the others like
            the context: an option may hold several answers with questions between them.
        mask: for a masked language model, the position in the context of the mask token, for which every option
            has one token.  None if the options follow the context.
        seq2seq: whether the context is for the encoder of an encoder-decoder, and the options for its decoder.

    >>> Encoded((1, 2), ((3, 4, 5, 6),), scored=((True, False, False, True),)).marks
    ((True, False, False, True),)
    """

    context: tuple[int, ...]
    options: tuple[tuple[int, ...], ...]
    cut: int = 0
    scored: tuple[tuple[bool, ...], ...] | None = None
    mask: int | None = None
    seq2seq: bool = False

    def __post_init__(self) -> None:
        if self.mask is not None:
            if self.scored is not None or any(len(option) != 1 for option in self.options):
                raise ZeroBlockError("a mask stands for one token: give options of one token each, and no scored")
            if not 0 <= self.mask < len(self.context):
                raise ZeroBlockError(f"mask is place {self.mask} of a context of {len(self.context)} tokens")
        if self.scored is None:
            return
        if tuple(map(len, self.scored)) != tuple(map(len, self.options)):
            raise ZeroBlockError("scored must have one mark per token of every option")
        if not all(map(any, self.scored)):
            raise ZeroBlockError("an option has no scored token")

    @property
    def marks(self) -> tuple[tuple[bool, ...], ...]:
        """For each token of each option, whether it carries loss."""
        return self.scored or tuple((True,) * len(option) for option in self.options)

    def only(self, option: int) -> Encoded:
        """The same context with one of the options."""
        scored = None if self.scored is None else (self.scored[option],)
        return replace(self, options=(self.options[option],), scored=scored)

    @property
    def rows(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """For each option the ids of the whole string, and how many at its end belong to the option."""
        if self.mask is not None:
            return ((self.context, 0),) * len(self.options)
        return tuple((self.context + option, len(option)) for option in self.options)

    @property
    def predictions(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each option its scored tokens: the place in the string that predicts each, and its id.

        >>> Encoded((1, 2), ((3, 4),)).predictions, Encoded((1, 9, 2), ((3,), (4,)), mask=1).predictions
        ((((1, 3), (2, 4)),), (((1, 3),), ((1, 4),)))
        """
        first = len(self.context) - 1 if self.mask is None else self.mask
        return tuple(
            tuple((first + k, token) for k, (token, counts) in enumerate(zip(option, marks, strict=True)) if counts)
            for option, marks in zip(self.options, self.marks, strict=True)
        )


@dataclass(frozen=True)
class Encoder:
    """Encodes examples for one tokenizer; make it with :meth:`of`.

    Args:
        tokenizer: a tokenizer of transformers, or anything with its ``encode``.
        prefix: the ids that the tokenizer puts before a text: the BOS token, or nothing.
        max_length: the maximum number of tokens of context and option together.
        eos: whether the end-of-sequence token is appended to every option.
    """

    tokenizer: Tokenizer
    prefix: tuple[int, ...]
    max_length: int = 2048
    eos: bool = False

    @property
    def opening(self) -> tuple[int, ...]:
        """The ids that begin every answer: none here, because an answer follows its context."""
        return ()

    @classmethod
    def of(cls, tokenizer: Tokenizer, max_length: int = 2048, *, eos: bool = False) -> Encoder:
        """Make the encoder of a tokenizer.

        Args:
            tokenizer: see the class.
            max_length: see the class; pass the model's own if that is shorter.
            eos: see the class.
        """
        if max_length < 2:
            raise ZeroBlockError(f"a maximum length of {max_length} has no space for a context and an option")
        if eos and tokenizer.eos_token_id is None:
            raise ZeroBlockError(
                "the tokenizer has no end-of-sequence token to end an answer with: set tokenizer.eos_token, or end "
                "answers of one line with a newline (--ending newline)"
            )
        return cls(tokenizer, _prefix(tokenizer), max_length, eos)

    def __call__(
        self, context: str, options: Sequence[str], *, reserve: int = 0, spans: Sequence[tuple[int, int]] = ()
    ) -> Encoded:
        """Encode a context with its options.

        A context that does not fit is cut on the left, after the BOS token, so that the
        longest option still fits; the options still share one context.

        Args:
            context: the text before the option.
            options: the texts that may follow it; without any, the context alone is encoded.
            reserve: tokens to leave free at the end, for generation.
            spans: ranges of characters of the context that carry loss too; only with a single option.  A range
                whose beginning is cut off carries none.
        """
        alone = self._ids(context)
        whole = [self._ids(context + option) for option in options]
        for option, ids in zip(options, whole, strict=True):
            if ids == alone:
                raise DataError(f"the tokenizer has no tokens for the option {option!r}")
        shared = _agreement([alone, *whole])
        end = (int(self.tokenizer.eos_token_id),) if self.eos else ()
        tails = tuple(ids[shared:] + (end if ids[-1:] != end else ()) for ids in whole)
        prefix = () if alone[: len(self.prefix)] == self.prefix else self.prefix  # a chat template adds the BOS
        kept = prefix + alone[:shared] or (self._anchor(),)
        longest = max(map(len, tails), default=0)
        space = self.max_length - reserve - longest
        if space < 1:
            wanted = f"{reserve} tokens to be generated" if reserve else f"an option of {longest} tokens"
            raise DataError(f"{wanted} in a maximum length of {self.max_length} leave no space for the context")
        cut, before = max(0, len(kept) - space), len(kept) - shared
        ranges = [(before + begin, before + end) for begin, end in self._ranges(context, alone[:shared], spans)]
        if cut:
            head = self.prefix if len(self.prefix) <= space else ()
            kept = head + kept[len(kept) - space + len(head) :]
            ranges = [(begin - cut, end - cut) for begin, end in ranges if begin - cut >= max(1, len(head))]
        return _spanned(Encoded(kept, tails, cut), ranges)

    def example(self, example: Example) -> Encoded:
        """Encode an example with all its options: for cross-entropy over them, and for choosing one."""
        with _naming(example):
            return self(example.context, example.options, spans=example.spans)

    def target(self, example: Example) -> Encoded:
        """Encode an example with only the option to train on: for teacher forcing."""
        with _naming(example):
            return self(example.context, (example.target,), spans=example.spans)

    def prompt(self, example: Example, max_new_tokens: int) -> Encoded:
        """Encode only the context of an example, with space for the text to generate."""
        with _naming(example):
            return self(example.context, (), reserve=max_new_tokens)

    def calibration(self, example: Example) -> Encoded | None:
        """Encode the options after the calibration context (SFC); None if there is no such context."""
        with _naming(example):
            return None if example.calibration is None else self(example.calibration, example.options)

    @functools.cached_property
    def suffix(self) -> tuple[int, ...]:
        """The ids that the tokenizer puts after every text."""
        whole = self.tokenizer.encode("a", add_special_tokens=True)
        return tuple(whole[len(self.prefix) + len(self._ids("a")) :])

    def _ranges(
        self, context: str, ids: tuple[int, ...], spans: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[int, int]]:
        """Find the tokens of ranges of characters: a range begins where the tokens of the text before it end."""
        for begin, end in spans:
            first, last = (_alike(self._ids(context[:place]), ids) for place in (begin, end))
            if first < last:
                yield first, last

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False)) if text else ()

    def _anchor(self) -> int:
        """A token that stands for an empty context: the first token of an option must be predicted from something."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise ZeroBlockError("the context is empty and the tokenizer has neither a BOS nor an EOS token to begin with")


class Cloze(Encoder):
    """Encodes examples for a masked language model, as texts with a gap; make it with :meth:`of`.

    An example is read as ``before <mask>after`` (:attr:`Example.gap`), by default its context and a full stop.  Every
    option is a word of one token: with the space before it that it has inside a text or, failing that, without.
    """

    @classmethod
    def of(cls, tokenizer: Tokenizer, max_length: int = 2048, *, eos: bool = False) -> Cloze:
        """Make the encoder of a tokenizer.

        Args:
            tokenizer: the tokenizer of a masked language model.
            max_length: the maximum number of tokens in a text.
            eos: must be False: with it, the task would generate text.
        """
        if eos:
            raise ZeroBlockError(NO_TEXT)
        if getattr(tokenizer, "mask_token_id", None) is None:
            raise ZeroBlockError("the tokenizer has no mask token for the model to fill in: set tokenizer.mask_token")
        if max_length < 2:
            raise ZeroBlockError(f"a maximum length of {max_length} has no space for a text and its mask")
        return cls(tokenizer, _prefix(tokenizer), max_length)

    def __call__(
        self,
        context: str,
        options: Sequence[str],
        *,
        reserve: int = 0,
        spans: Sequence[tuple[int, int]] = (),
        after: str = FULL_STOP,
    ) -> Encoded:
        """Encode a text with a gap, and the words that may fill it.

        A text that does not fit is cut on the left; the tokens that begin every text stay.

        Args:
            context: the text before the gap.
            options: the words.
            reserve: must be zero, because nothing is generated.
            spans: must be empty, because only the gap carries loss.
            after: the text after the gap.
        """
        if reserve or spans or not options:
            raise ZeroBlockError(NO_TEXT)
        tokenizer: Any = self.tokenizer
        before = context.rstrip()
        text = f"{before} {tokenizer.mask_token}{after}" if before else f"{tokenizer.mask_token}{after}"
        ids = self._ids(text)
        places = [place for place, token in enumerate(ids) if token == tokenizer.mask_token_id]
        if len(places) != 1:
            raise DataError(f"the text holds {tokenizer.mask_token!r}, which stands for the word to be filled in")
        cut = max(0, len(self.prefix) + len(ids) + len(self.suffix) - self.max_length)
        if cut > places[0]:
            raise DataError(f"the text after the mask leaves no space for it in a maximum length of {self.max_length}")
        words = tuple((self._word(option.strip()),) for option in options)
        return Encoded(self.prefix + ids[cut:] + self.suffix, words, cut, mask=len(self.prefix) + places[0] - cut)

    def example(self, example: Example) -> Encoded:
        """Encode an example with all its options."""
        return self._gap(example, example.options)

    def target(self, example: Example) -> Encoded:
        """Encode an example with only the option to train on."""
        return self._gap(example, (example.target,))

    def _gap(self, example: Example, options: Sequence[str]) -> Encoded:
        before, after = (example.context, FULL_STOP) if example.gap is None else example.gap
        with _naming(example):
            return self(before, options, spans=example.spans, after=after)

    def _word(self, word: str) -> int:
        """The token of a word."""
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        ways = [self._ids(f" {word}"), self._ids(word)]
        for ids in ways:
            if len(ids) == 1 and ids[0] != unknown:
                return int(ids[0])
        count = "is unknown to the tokenizer" if unknown in ways[0] else f"has {len(ways[0])} tokens"
        raise DataError(f"the option {word!r} {count}, and a mask stands for one: choose a word that is one token")


@contextlib.contextmanager
def _naming(example: Example) -> Iterator[None]:
    """Context manager that adds the row's file and line to a :class:`DataError`."""
    try:
        yield
    except DataError as error:
        if not example.where:
            raise
        raise ZeroBlockError(f"{example.where}: {error}") from error


def _agreement(strings: Sequence[tuple[int, ...]]) -> int:
    """Count the tokens that all strings begin with, leaving at least one to every string but the first."""
    most = min(len(ids) - (i > 0) for i, ids in enumerate(strings))
    return min(most, *(_alike(strings[0], ids) for ids in strings))


def _alike(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Count the tokens that two strings begin with."""
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _spanned(one: Encoded, ranges: Sequence[tuple[int, int]]) -> Encoded:
    """Move the context, from the first of these token ranges onward, into the option; the ranges carry loss there."""
    scored = {place for begin, end in ranges for place in range(begin, end) if place}  # nothing predicts the first
    if not scored:
        return one
    first, (option,) = min(scored), one.options
    marks = tuple(place in scored for place in range(first, len(one.context))) + (True,) * len(option)
    return Encoded(one.context[:first], (one.context[first:] + option,), one.cut, (marks,))


def _prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that the tokenizer puts before every text; ids that it puts after one do not count."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    marked = tokenizer.encode("a", add_special_tokens=True)
    starts = range(len(marked) - len(plain) + 1)
    return tuple(marked[: next((i for i in starts if marked[i : i + len(plain)] == plain), 0)])
