"""Pairs: a batch of examples for an encoder-decoder, as padded contexts and padded options.

The encoder reads every context once.  The decoder reads the start token and an option without its last token, and
predicts the option.  If the tokens read for one option are the beginning of another's, one string of the decoder
serves both, so options of one token each cost a single string.

    contexts   [ context of 0 ]        options   [ start | option 0 of 0 ] ─► context of 0
               [ context of 1 ]                  [ start | option 1 of 0 ] ─► context of 0
                                                 [ start | options of 1  ] ─► context of 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .pack import tables

if TYPE_CHECKING:
    from ..task.encoding import Encoded


@dataclasses.dataclass(frozen=True)
class Pairs:
    """E contexts of at most S tokens and D strings of at most T tokens, all padded on the right.

    Args:
        tokens: (E, S) ids of the contexts.
        mask: (E, S) ones where there is a token.
        inputs: (D, T) ids that the decoder reads.
        context: (D,) the context of each string.
        keep: (P,) places in the D·T whose logits are needed.
        source, target, spans, lengths, slots: as in :class:`~zeroblock.engine.pack.Row`.
    """

    tokens: Tensor
    mask: Tensor
    inputs: Tensor
    context: Tensor
    keep: Tensor
    source: Tensor
    target: Tensor
    spans: Tensor
    lengths: Tensor
    slots: Tensor

    def to(self, device: torch.device) -> Pairs:
        """The same pairs on a device."""
        return Pairs(**{f.name: getattr(self, f.name).to(device) for f in dataclasses.fields(self)})


def pair(batch: Sequence[Encoded], start: int, padding: int = 0) -> Pairs:
    """Lay out a batch of examples for an encoder-decoder.

    Args:
        batch: examples, each with at least one option.
        start: the token that the decoder begins with.
        padding: the token that pads the strings; nothing sees it.
    """
    strings: list[tuple[int, ...]] = []
    context: list[int] = []
    chosen: list[tuple[int, int, int]] = []  # string, place in it, and the token that is predicted there
    lengths: list[tuple[int, ...]] = []
    for number, one in enumerate(batch):
        inputs = [(start, *option[:-1]) for option in one.options]
        first, homes = len(strings), [0] * len(inputs)
        for k in sorted(range(len(inputs)), key=lambda k: -len(inputs[k])):
            mine = inputs[k]
            there = (s for s in range(first, len(strings)) if strings[s][: len(mine)] == mine)
            homes[k] = next(there, len(strings))
            if homes[k] == len(strings):
                strings.append(mine)
                context.append(number)
        for home, option, marks in zip(homes, one.options, one.marks, strict=True):
            places = enumerate(zip(option, marks, strict=True))
            chosen += [(home, place, token) for place, (token, counts) in places if counts]
        lengths.append(tuple(map(sum, one.marks)))
    tokens, mask = _filled([one.context for one in batch], padding)
    decoded, _ = _filled(strings, padding)
    kept: dict[int, int] = {}
    source = [kept.setdefault(home * decoded.shape[1] + place, len(kept)) for home, place, _ in chosen]
    spans, counts, slots = tables(tuple(lengths), len(source))
    return Pairs(
        tokens,
        mask,
        decoded,
        torch.tensor(context),
        torch.tensor(list(kept)),
        torch.tensor(source),
        torch.tensor([token for *_, token in chosen]),
        spans,
        counts,
        slots,
    )


def split(batch: Sequence[Encoded], max_tokens: int | None) -> Iterator[list[int]]:
    """Indices of the examples of each row: in order, as many as fit with their padding, at least one."""
    row: list[int] = []
    for i in range(len(batch)):
        if row and max_tokens is not None and _area([batch[k] for k in (*row, i)]) > max_tokens:
            yield row
            row = []
        row.append(i)
    if row:
        yield row


def _area(batch: Sequence[Encoded]) -> int:
    """Number of tokens of a row, padding included."""
    options = [len(option) for one in batch for option in one.options]
    return len(batch) * max(len(one.context) for one in batch) + len(options) * max(options)


def _filled(strings: Sequence[tuple[int, ...]], padding: int) -> tuple[Tensor, Tensor]:
    """Strings padded to one length, and a mask with ones where there is a token."""
    width = max(map(len, strings))
    ids = torch.full((len(strings), width), padding)
    mask = torch.zeros_like(ids)
    for row, string in enumerate(strings):
        ids[row, : len(string)] = torch.tensor(string)
        mask[row, : len(string)] = 1
    return ids, mask
