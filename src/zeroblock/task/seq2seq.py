"""Encoding for encoder-decoders: the context is one text, for the encoder, and every option another, for the decoder.

Each is tokenized as a whole text.  The tokenizer surrounds the context with its tokens for a source (T5's ``</s>`` at
the end) and puts its tokens for a target before an option (BART's ``<s>``); these carry no loss.  A generated answer
always ends with the end-of-sequence token, even if a newline ends it for a decoder-only model.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ..errors import ZeroBlockError
from .encoding import Encoded, Encoder
from .example import DataError


class Seq2Seq(Encoder):
    """Encodes examples for an encoder-decoder; make it with :meth:`of`.

    ``max_length`` limits the tokens of a context, and likewise those of an option.
    """

    def __call__(
        self, context: str, options: Sequence[str], *, reserve: int = 0, spans: Sequence[tuple[int, int]] = ()
    ) -> Encoded:
        """Encode a context with its options.

        A context that does not fit is cut on the left; the tokens that begin every text stay.

        Args:
            context: the text that the encoder reads.
            options: the texts that the decoder may write; those that end with a newline, at which generation stops
                in a decoder-only model, end with the end-of-sequence token instead.
            reserve: the number of tokens to generate, which must fit into ``max_length``.
            spans: must be empty, because the encoder writes nothing.
        """
        if spans:
            raise DataError(
                "the earlier answers of a chat are in the context, which an encoder reads and does not write: train on "
                "the last answer alone (--turns last)"
            )
        ids = self._ids(context)
        space = self.max_length - len(self.prefix) - len(self.suffix)
        cut = max(0, len(ids) - space)
        written = tuple(map(self._option, options))
        longest = max(map(len, written), default=len(self.opening) + reserve)
        if space < 1 or longest > self.max_length:
            wanted = f"{reserve} tokens to be generated" if reserve else f"an option of {longest} tokens"
            raise DataError(f"{wanted} and a context do not fit into a maximum length of {self.max_length}")
        marks = tuple(tuple(k >= len(self.opening) for k in range(len(option))) for option in written)
        kept = self.prefix + ids[cut:] + self.suffix
        return Encoded(kept or (self._anchor(),), written, cut, marks if self.opening else None, seq2seq=True)

    @functools.cached_property
    def opening(self) -> tuple[int, ...]:
        """The ids that the tokenizer puts before every target: none for T5, the language's for mBART."""
        marked, plain = self._target("a", True), self._target("a", False)
        starts = range(len(marked) - len(plain) + 1)
        return marked[: next((i for i in starts if marked[i : i + len(plain)] == plain), 0)]

    def _option(self, option: str) -> tuple[int, ...]:
        ids = self._target(option.strip(), False)
        if not ids:
            raise DataError(f"the tokenizer has no tokens for the option {option!r}")
        ends = self.eos or option.endswith("\n")
        if ends and self.tokenizer.eos_token_id is None:
            raise ZeroBlockError(
                "the tokenizer has no end-of-sequence token to end an answer with: set tokenizer.eos_token"
            )
        end = (int(self.tokenizer.eos_token_id),) if ends else ()
        return self.opening + ids + (end if ids[-1:] != end else ())

    def _target(self, text: str, special: bool) -> tuple[int, ...]:
        """The ids of a text for the decoder to write; some tokenizers encode targets and sources differently."""
        tokenizer: Any = self.tokenizer
        if not callable(tokenizer):
            return tuple(tokenizer.encode(text, add_special_tokens=special))
        return tuple(tokenizer(text_target=text, add_special_tokens=special)["input_ids"])
