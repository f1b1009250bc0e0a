"""Packing: a batch of examples as one row of tokens.

Nothing that texts have in common is computed twice.  The tokens that all examples begin with are the
row's root: the BOS token, and often the first words of a template, a system prompt or demonstrations.
After it the examples lie end to end, with restarting positions.  The options of an example share its
trunk: the rest of the context, and the tokens that all options begin with.  The rest of each option
branches off the trunk.  The last token of an option is only predicted, so it is not in the row, and
single-token options cost nothing.

    row       [ root ][ trunk of 0 | branch | branch ][ trunk of 1 ][ trunk of 2 | branch ] …

A token sees the root, its example's trunk and its own branch up to itself; an example with a mask is all
trunk, and each of its tokens sees every other.  Every example is contiguous, so four numbers per token
and the length of the root are enough to say this: see :class:`Row`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from ..task.encoding import Encoded

MAX_STRANDS, MAX_STRAND_TOKENS = 1 << 12, 1 << 10
"""The most examples whose layouts are cached, and the most tokens in the context of one: about 170 MB in all."""
MAX_TABLES = 256
"""The most combinations of option lengths whose tables are cached."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Examples packed into S tokens, of which P predict the N tokens of O options of E examples.

    A query q sees the keys k ≤ until[q] with ``k < root``, ``start[q] ≤ k < trunk[q]`` or ``k ≥ branch[q]``.

    Args:
        tokens: (S,) ids.
        positions: (S,) position of each token in its own string.
        start: (S,) first token of the example after the root; 0 for a token of the root.
        trunk: (S,) end of the example's trunk for a token of a branch; ``start`` for one of the trunk.
        branch: (S,) first token of the branch; ``start`` for a token of the trunk.
        until: (S,) last token that is seen: the token itself, or the last of an example with a mask.
        root: (1,) number of tokens at the beginning of the row that all examples share.
        keep: (P,) tokens whose logits are needed.
        source: (N,) for each scored token, the index into ``keep`` that predicts it.
        target: (N,) its id.
        spans: (O, longest) the scored tokens of each option; N stands for none.
        lengths: (O,) number of scored tokens of each option.
        slots: (E, most options) the options of each example; O stands for none.
    """

    tokens: Tensor
    positions: Tensor
    start: Tensor
    trunk: Tensor
    branch: Tensor
    until: Tensor
    root: Tensor
    keep: Tensor
    source: Tensor
    target: Tensor
    spans: Tensor
    lengths: Tensor
    slots: Tensor

    def to(self, device: torch.device) -> Row:
        """The same row on a device, by one asynchronous copy."""
        if device == self.tokens.device:
            return self
        flat = self.flat()
        pinned = device.type == "cuda" and flat.device.type == "cpu"
        return self.view(flat.pin_memory().to(device, non_blocking=True) if pinned else flat.to(device))

    def flat(self) -> Tensor:
        """All fields, end to end in one tensor."""
        return torch.cat(self.parts)

    @property
    def parts(self) -> list[Tensor]:
        """All fields, each in one dimension.

        Those that layers read come first.  Layers that were captured for S tokens run on every row of S tokens and
        read where they read before, so what is scored must not move these fields.
        """
        return [getattr(self, name).view(-1) for name in FIELDS]

    def view(self, flat: Tensor) -> Row:
        """A row with this one's shapes over the numbers of another row's ``flat``."""
        parts = [getattr(self, name) for name in FIELDS]
        pieces = flat.split([part.numel() for part in parts])
        return Row(*(new.view(old.shape) for old, new in zip(parts, pieces, strict=True)))

    @property
    def shapes(self) -> tuple[int, ...]:
        """The dimensions of all fields; rows with equal dimensions can take each other's numbers."""
        sizes = (self.tokens, self.keep, self.source, self.spans, self.slots)
        return tuple(itertools.chain.from_iterable(field.shape for field in sizes))

    def sees(
        self, window: int | None = None, queries: slice = slice(None), keys: slice | Tensor = slice(None)
    ) -> Tensor:
        """The mask of attention, (queries, keys): True where the query sees the key.

        Args:
            window: keys at least this many positions away are not seen either.
            queries: a piece of the row; all of it by default.
            keys: a piece of the row, or (K,) ascending places of it; all of it by default.
        """
        places = torch.arange(len(self.tokens), device=self.tokens.device)
        key = places[keys][None, :]
        mask = (key >= self.start[queries, None]) & (key < self.trunk[queries, None])
        mask |= (key >= self.branch[queries, None]) | (key < self.root)
        mask &= key <= self.until[queries, None]
        if window is not None:
            mask &= (self.positions[queries, None] - self.positions[keys][None, :]).abs() < window
        return mask


FIELDS = tuple(field.name for field in dataclasses.fields(Row))


def split(costs: Sequence[int], max_tokens: int | None, alone: Container[int] = ()) -> Iterator[list[int]]:
    """Indices of the examples of each row: in order, as many as fit, at least one.

    >>> list(split([3, 4, 5, 9], max_tokens=8))
    [[0, 1], [2], [3]]

    Args:
        costs: number of tokens that each example takes in a row.
        max_tokens: the most tokens in a row; None for no limit.
        alone: examples that share no row.
    """
    row: list[int] = []
    used = 0
    for i, tokens in enumerate(costs):
        full = max_tokens is not None and used + tokens > max_tokens
        if row and (full or i in alone or row[-1] in alone):
            yield row
            row, used = [], 0
        row.append(i)
        used += tokens
    if row:
        yield row


def pack(batch: Sequence[Encoded], multiple: int = 1, scored: int = 1) -> Row:
    """Pack a batch into one row; see :func:`join`."""
    return join(list(map(lay, batch)), root(batch), multiple, scored)


def root(batch: Sequence[Encoded]) -> int:
    """Number of tokens that all contexts begin with; 0 for a single example, and where an encoder reads contexts."""
    if len(batch) < 2 or any(one.mask is not None or one.seq2seq for one in batch):
        return 0
    return _common([one.context for one in batch])


def join(strands: Sequence[Strand], root: int = 0, multiple: int = 1, scored: int = 1) -> Row:
    """Lay examples end to end.

    Args:
        strands: the examples, each with at least one option.
        root: number of tokens that all of them begin with, which are laid down once.
        multiple: S is rounded up to a multiple of this, with tokens that nothing sees or scores.
        scored: P and N are rounded up to a multiple of this, with entries that no option counts.
    """
    sizes = [strand.cost - root for strand in strands]
    kept = [len(strand.keep) for strand in strands]
    counts = [sum(strand.lengths) for strand in strands]
    firsts = np.array(list(itertools.accumulate(sizes[:-1], initial=0)))  # where a strand's place 0 would lie
    before = np.array(list(itertools.accumulate(kept[:-1], initial=0)))
    keep = np.concatenate([strand.keep for strand in strands])
    source, target = np.concatenate([strand.targets for strand in strands], 1)
    source = source + before.repeat(counts)
    in_root = keep < root
    keep = np.where(in_root, keep, keep + firsts.repeat(kept))
    if in_root.any():  # examples may share places, whose logits are needed once
        keep, again = np.unique(keep, return_inverse=True)
        source = again[source]
    length, used, counted = root + sum(sizes), len(keep), len(source)
    s, p, n = -(-length // multiple) * multiple, -(-used // scored) * scored, -(-counted // scored) * scored
    numbers = np.zeros(6 * s + 1 + p + 2 * n, np.int64)
    places = numbers[: 6 * s].reshape(6, s)
    parts = [strand.places[:, root:] for strand in strands]
    np.concatenate([strands[0].places[:, :root], *parts], 1, out=places[:, :length])
    own = places[2:, root:length]
    np.maximum(own, root, out=own)
    own += firsts.repeat(sizes)
    places[2:, length:] = np.arange(length, s)
    end = 6 * s
    for values, room in (([root], 1), (keep, p), (source, n), (target, n)):
        numbers[end : end + len(values)] = values
        end += room
    fields = torch.from_numpy(numbers).split([s] * 6 + [1, p, n, n])
    return Row(*[*fields, *tables(tuple([strand.lengths for strand in strands]), n)])


@functools.lru_cache(maxsize=MAX_TABLES)
def tables(lengths: tuple[tuple[int, ...], ...], none: int) -> tuple[Tensor, Tensor, Tensor]:
    """``spans``, ``lengths`` and ``slots`` of a row, given the lengths of each example's options.

    Rows of questions with the same options share these tensors, so never write to them.
    """
    flat = [length for options in lengths for length in options]
    numbers = itertools.count()
    slots = _filled([[next(numbers) for _ in options] for options in lengths], len(flat))
    return torch.tensor(_spans(flat, none)), torch.tensor(flat), torch.tensor(slots)


class Strand(NamedTuple):
    """The layout of one example, as if its row began with it.

    Args:
        lengths: number of scored tokens of each option.
        cost: number of tokens that the example takes in a row, n.
        places: (6, n) tokens, positions, start, trunk, branch and until, as in :class:`Row`.
        keep: (p,) as in :class:`Row`.
        targets: (2, scored tokens) source and target, as in :class:`Row`.
    """

    lengths: tuple[int, ...]
    cost: int
    places: NDArray[np.int64]
    keep: NDArray[np.int64]
    targets: NDArray[np.int64]


def lay(one: Encoded) -> Strand:
    """The layout of an example, cached unless the example is long."""
    strand = _strand if len(one.context) <= MAX_STRAND_TOKENS else _strand.__wrapped__
    return strand(one.context, one.options, one.scored, one.mask)


@functools.lru_cache(maxsize=MAX_STRANDS)
def _strand(
    context: tuple[int, ...],
    options: tuple[tuple[int, ...], ...],
    scored: tuple[tuple[bool, ...], ...] | None,
    mask: int | None,
) -> Strand:
    """Lay out an example; a run needs its layout again in every epoch."""
    if mask is not None:
        return _masked(context, [token for (token,) in options], mask)
    shared = _shared(options)
    tokens = [*context, *options[0][:shared]]
    end = len(tokens)
    positions, trunk, branch = list(range(end)), [0] * end, [0] * end
    kept: dict[int, int] = {}
    source, target, lengths = [], [], []
    for k, option in enumerate(options):
        here, rest = len(tokens), option[shared:-1]
        tokens += rest
        positions += range(end, end + len(rest))
        trunk += [end] * len(rest)
        branch += [here] * len(rest)
        places = itertools.chain(range(end - shared - 1, end), range(here, here + len(rest)))
        counts = itertools.repeat(True) if scored is None else scored[k]
        chosen = [(place, token) for place, token, count in zip(places, option, counts, strict=False) if count]
        source += [kept.setdefault(place, len(kept)) for place, _ in chosen]
        target += [token for _, token in chosen]
        lengths.append(len(chosen))
    until = range(len(tokens))
    arrays = ((tokens, positions, [0] * len(tokens), trunk, branch, until), list(kept), (source, target))
    return Strand(tuple(lengths), len(tokens), *(np.array(array, np.int64) for array in arrays))


def _masked(context: tuple[int, ...], options: Sequence[int], mask: int) -> Strand:
    """Lay out an example whose options take the place of its mask."""
    n, none = len(context), [0] * len(context)
    arrays = ((context, range(n), none, none, none, [n - 1] * n), [mask], ([0] * len(options), options))
    return Strand((1,) * len(options), n, *(np.array(array, np.int64) for array in arrays))


def _spans(lengths: Sequence[int], none: int) -> list[list[int]]:
    """Consecutive numbers for each option, one per scored token."""
    ends = list(itertools.accumulate(lengths))
    return _filled([list(range(end - own, end)) for end, own in zip(ends, lengths, strict=True)], none)


def _filled(rows: list[list[int]], none: int) -> list[list[int]]:
    """Rows padded to one length."""
    most = max(map(len, rows))
    return [row + [none] * (most - len(row)) for row in rows]


def _shared(options: Sequence[tuple[int, ...]]) -> int:
    """Number of tokens that all options begin with, leaving each option at least its last."""
    return min(_common(options), min(map(len, options)) - 1)


def _common(strings: Sequence[tuple[int, ...]]) -> int:
    """Number of tokens that all strings begin with: as many as the first and the last in order have in common."""
    low, high = min(strings), max(strings)
    return next((k for k, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))


@dataclasses.dataclass(frozen=True)
class Padded:
    """Every option of every example as a separate string, padded on the right: B strings of at most T tokens.

    Args:
        tokens: (B, T) ids.
        mask: (B, T) ones where there is a token.
        source: (N,) for each scored token, the place in the B·T that predicts it.
        target, spans, lengths, slots: as in :class:`Row`.
    """

    tokens: Tensor
    mask: Tensor
    source: Tensor
    target: Tensor
    spans: Tensor
    lengths: Tensor
    slots: Tensor

    def to(self, device: torch.device) -> Padded:
        """The same strings on a device."""
        return Padded(**{f.name: getattr(self, f.name).to(device) for f in dataclasses.fields(self)})


def pad(batch: Sequence[Encoded]) -> Padded:
    """Pad the strings of a batch, for models that cannot be packed."""
    strings = [(ids, pairs) for one in batch for (ids, _), pairs in zip(one.rows, one.predictions, strict=True)]
    width = max(len(ids) for ids, _ in strings)
    tokens, mask = (torch.zeros(len(strings), width, dtype=torch.long) for _ in range(2))
    source: list[int] = []
    target: list[int] = []
    for b, (ids, pairs) in enumerate(strings):
        tokens[b, : len(ids)] = torch.tensor(ids)
        mask[b, : len(ids)] = 1
        source += [b * width + place for place, _ in pairs]
        target += [token for _, token in pairs]
    lengths = iter([len(pairs) for _, pairs in strings])
    spans, counts, slots = tables(tuple(tuple(next(lengths) for _ in one.options) for one in batch), len(source))
    return Padded(tokens, mask, torch.tensor(source), torch.tensor(target), spans, counts, slots)
