"""Packing: a batch of examples as one row of tokens.

Examples lie end to end with restarting positions.  What an example's options share
(the context, and the tokens all options begin with) is its trunk, laid down once;
what is left of each option branches off it.  The last token of an option is only
ever predicted, so it is not in the row, and single-token options cost nothing.

    row       [ trunk of 0 | branch | branch ][ trunk of 1 ][ trunk of 2 | branch ] …

A token sees its example's trunk and its own branch up to itself.  As every example is
contiguous, two numbers a token say so: see :class:`Row`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..task.encoding import Encoded


@dataclasses.dataclass(frozen=True)
class Row:
    """Examples packed into S tokens, of which P predict the N tokens of O options of E examples.

    A query q sees the keys k ≤ q with ``start[q] ≤ k < trunk[q]`` or ``k ≥ branch[q]``.

    Args:
        tokens: (S,) ids.
        positions: (S,) places in their own string.
        start: (S,) first token of the example.
        trunk: (S,) end of the example's trunk for a token of a branch; ``start`` for one of the trunk.
        branch: (S,) first token of the branch; ``start`` for a token of the trunk.
        keep: (P,) tokens whose logits are needed.
        source: (N,) for each scored token, the index into ``keep`` that predicts it.
        target: (N,) its id.
        option: (N,) the option it belongs to.
        lengths: (O,) tokens of each option.
        slots: (E, most options) the options of each example; O stands for none.
    """

    tokens: Tensor
    positions: Tensor
    start: Tensor
    trunk: Tensor
    branch: Tensor
    keep: Tensor
    source: Tensor
    target: Tensor
    option: Tensor
    lengths: Tensor
    slots: Tensor

    def to(self, device: torch.device) -> Row:
        """The same on a device, by one copy that does not wait."""
        if device == self.tokens.device:
            return self
        names = [f.name for f in dataclasses.fields(self)]
        parts: list[Tensor] = [getattr(self, name) for name in names]
        flat = torch.cat([part.flatten() for part in parts])
        if device.type == "cuda":
            flat = flat.pin_memory()
        moved = flat.to(device, non_blocking=True).split([part.numel() for part in parts])
        return Row(**{name: new.view(old.shape) for name, new, old in zip(names, moved, parts, strict=True)})

    def sees(self, window: int | None = None, a: int = 0, b: int | None = None) -> Tensor:
        """The mask of the tokens a to b: True where the query (row) sees the key (column).

        Args:
            window: a key at least so many positions back is not seen either.
            a: first token.
            b: end; that of the row unless given.
        """
        q = slice(a, b)
        at = torch.arange(len(self.tokens), device=self.tokens.device)[q]
        key, query = at[None, :], at[:, None]
        mask = (key >= self.start[q, None]) & (key < self.trunk[q, None]) | (key >= self.branch[q, None])
        mask &= key <= query
        if window is not None:
            mask &= self.positions[q, None] - self.positions[None, q] < window
        return mask


def cost(one: Encoded) -> int:
    """Tokens an example takes in a row."""
    shared = _shared(one.options)
    return len(one.context) + shared + sum(len(option) - 1 - shared for option in one.options)


def split(batch: Sequence[Encoded], max_tokens: int | None) -> Iterator[list[int]]:
    """Indices of the examples of each row: in order, as many as a budget holds, at least one."""
    row: list[int] = []
    used = 0
    for i, one in enumerate(batch):
        tokens = cost(one)
        if row and max_tokens is not None and used + tokens > max_tokens:
            yield row
            row, used = [], 0
        row.append(i)
        used += tokens
    if row:
        yield row


def pack(batch: Sequence[Encoded], multiple: int = 1) -> Row:
    """One row of a batch.

    Args:
        batch: examples, each with at least one option.
        multiple: the row's length is rounded up to a multiple of this by tokens that see and score nothing.
    """
    columns: dict[str, list[int]] = {f.name: [] for f in dataclasses.fields(Row)}
    tokens, positions = columns["tokens"], columns["positions"]
    start, trunk, branch = columns["start"], columns["trunk"], columns["branch"]
    most = max(len(one.options) for one in batch)
    slots: list[list[int]] = []
    kept: dict[int, int] = {}

    for one in batch:
        shared = _shared(one.options)
        stem = one.context + one.options[0][:shared]
        first = len(tokens)
        end = first + len(stem)
        tokens += stem
        positions += range(len(stem))
        start += [first] * len(stem)
        trunk += [first] * len(stem)
        branch += [first] * len(stem)
        slots.append([])
        for option in one.options:
            here = len(tokens)
            rest = option[shared:-1]
            tokens += rest
            positions += range(len(stem), len(stem) + len(rest))
            start += [first] * len(rest)
            trunk += [end] * len(rest)
            branch += [here] * len(rest)
            places = itertools.chain(range(end - shared - 1, end), range(here, here + len(rest)))
            number = len(columns["lengths"])
            for place, token in zip(places, option, strict=True):
                columns["source"].append(kept.setdefault(place, len(kept)))
                columns["target"].append(token)
                columns["option"].append(number)
            columns["lengths"].append(len(option))
            slots[-1].append(number)
    for place in range(len(tokens), -(-len(tokens) // multiple) * multiple):
        tokens.append(0)
        positions.append(0)
        for column in (start, trunk, branch):
            column.append(place)
    columns["keep"] = list(kept)
    none = len(columns["lengths"])
    table = torch.tensor([row + [none] * (most - len(row)) for row in slots])
    return Row(**{n: torch.tensor(c) for n, c in columns.items() if n != "slots"}, slots=table)


def _shared(options: Sequence[tuple[int, ...]]) -> int:
    """How many tokens all options begin with, leaving each at least its last."""
    most = min(len(option) for option in options) - 1
    first = options[0]
    return next((k for k in range(most) if any(option[k] != first[k] for option in options)), most)


@dataclasses.dataclass(frozen=True)
class Padded:
    """Every option of every example as a string of its own, padded on the right: B strings of at most T tokens.

    Args:
        tokens: (B, T) ids.
        mask: (B, T) one where there is a token.
        source: (N,) for each scored token, the place in the B·T that predicts it.
        target, option, lengths, slots: as in :class:`Row`.
    """

    tokens: Tensor
    mask: Tensor
    source: Tensor
    target: Tensor
    option: Tensor
    lengths: Tensor
    slots: Tensor


def pad(batch: Sequence[Encoded], device: torch.device) -> Padded:
    """The strings of a batch, for models that cannot be packed."""
    strings = [row for one in batch for row in one.rows]
    width = max(len(ids) for ids, _ in strings)
    tokens, mask = (torch.zeros(len(strings), width, dtype=torch.long) for _ in range(2))
    source: list[int] = []
    for b, (ids, own) in enumerate(strings):
        tokens[b, : len(ids)] = torch.tensor(ids)
        mask[b, : len(ids)] = 1
        source += range(b * width + len(ids) - own - 1, b * width + len(ids) - 1)
    most = max(len(one.options) for one in batch)
    numbers = iter(range(len(strings)))
    slots = [[next(numbers) for _ in one.options] + [len(strings)] * (most - len(one.options)) for one in batch]
    lengths = [own for _, own in strings]
    columns = {
        "source": source,
        "target": [token for ids, own in strings for token in ids[len(ids) - own :]],
        "option": [b for b, own in enumerate(lengths) for _ in range(own)],
        "lengths": lengths,
        "slots": slots,
    }
    return Padded(tokens.to(device), mask.to(device), **{n: torch.tensor(c, device=device) for n, c in columns.items()})
