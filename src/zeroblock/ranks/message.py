"""The message of a step: the losses of every micro-batch of a rank, and how the losses of all ranks become one row.

A message is a table in fp64, one row per micro-batch: the amount that the micro-batch counts, then its
losses at the points that the rank measures.  It has 8·(1 + points) bytes per micro-batch, at most 16 per loss.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

ABSENT = -1.0
"""The amount of a row that holds no micro-batch."""
FAILED = -2.0
"""The amount that a rank sends in place of losses that it could not measure; FAILED - n asks for n rows."""

Weight = tuple[str, float]
"""The unit and the number of things that a loss is a mean over, such as ("tokens", 103.0)."""


def amounts_of(weights: Sequence[Weight | None], unit: str | None) -> list[float]:
    """The amount of each micro-batch in the mean; NaN if it is not a mean over ``unit``.

    >>> amounts_of([("tokens", 7.0), None], "tokens")
    [7.0, nan]
    """
    return [math.nan if weight is None or weight[0] != unit else float(weight[1]) for weight in weights]


def common_unit(units: Sequence[str | None]) -> str | None:
    """The unit that all losses are means over; None if one is unknown, or if they differ."""
    return units[0] if units and len(set(units)) == 1 else None


def mean(values: Tensor, amounts: Tensor) -> Tensor:
    """The mean over micro-batches, in their order, on whatever device they are.

    Σ aᵢ·Lᵢ / Σ aᵢ with the amounts as weights, or Σ Lᵢ / n if they are equal or one is unknown.  Sums go from the
    first micro-batch to the last one, so that a process with n micro-batches and n ranks with one each get the same
    bits.

    Args:
        values: (n, points) the losses, in fp64.
        amounts: (n,) in fp64; NaN if unknown, ``ABSENT`` for rows that do not count.

    Returns:
        (points,).
    """
    there = amounts != ABSENT  # NaN counts, too
    known = ~(amounts.isnan() & there).any()
    shares = torch.where(there, torch.where(known, amounts, 1.0), 0.0)
    low, high = torch.where(there, shares, torch.inf).amin(), torch.where(there, shares, -torch.inf).amax()
    values = torch.where(there[:, None], values, 0.0)
    table = torch.cat([values, values * shares[:, None], shares[:, None], there[:, None].to(values)], 1)
    totals = table.cumsum(0)[-1]  # in order: the order of a plain sum depends on the device
    plain, weighted, (total, count) = totals[: values.shape[1]], totals[values.shape[1] : -2], totals[-2:]
    return torch.where(low == high, plain / count, weighted / total)


@dataclasses.dataclass(frozen=True)
class Shares:
    """The points that each share of the probes measures.

    Args:
        owners: (points,) the probe of each point.
        count: number of shares, which are consecutive probes and as equal in size as possible.
    """

    owners: tuple[int, ...]
    count: int

    @functools.cached_property
    def points(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the points of each share, in order."""
        probes = sorted(set(self.owners))
        bounds = [len(probes) * k // self.count for k in range(self.count + 1)]
        pieces = [set(probes[a:b]) for a, b in itertools.pairwise(bounds)]
        return tuple(tuple(i for i, owner in enumerate(self.owners) if owner in piece) for piece in pieces)

    @functools.cached_property
    def width(self) -> int:
        """Losses per row of a message: the points of the largest share."""
        return max(map(len, self.points))

    def probes(self, share: int) -> tuple[tuple[int, ...], ...]:
        """The points of a share, probe by probe."""
        mine = self.points[share]
        return tuple(
            tuple(i for i in mine if self.owners[i] == owner) for owner in dict.fromkeys(self.owners[i] for i in mine)
        )

    def pack(self, losses: Tensor, amounts: Sequence[float], capacity: int) -> Tensor:
        """(capacity, 1 + width) the message of a rank on the host.

        Args:
            losses: (micro-batches, points of the share).
            amounts: (micro-batches,) see :func:`amounts_of`.
            capacity: rows of the message; if there are more micro-batches, it asks for more rows.
        """
        message = torch.zeros(capacity, 1 + self.width, dtype=torch.float64)
        message[:, 0] = ABSENT
        if len(amounts) > capacity:
            message[0, 0] = FAILED - len(amounts)
        elif len(amounts):
            message[: len(amounts), 0] = torch.tensor(amounts, dtype=torch.float64)
            message[: len(amounts), 1 : 1 + losses.shape[1]] = losses
        return message

    def unpack(self, table: Tensor, grid: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """The losses of every micro-batch at every point, and their amounts.

        Args:
            table: (ranks, capacity, 1 + width) the messages of all ranks.
            grid: (shares of the data, shares of the probes) the ranks.

        Returns:
            (micro-batches, points), (micro-batches,), in the order of the shares of the data.
        """
        losses, amounts = _places(self, tuple(map(tuple, grid)), table.shape[1], table.device)
        flat = table.reshape(-1)
        return flat[losses], flat[amounts]


@functools.lru_cache(maxsize=64)
def _places(
    shares: Shares, grid: tuple[tuple[int, ...], ...], capacity: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Where the losses (micro-batches, points) and the amounts (micro-batches,) lie in the messages of all ranks."""
    place = {i: (k, 1 + column) for k, points in enumerate(shares.points) for column, i in enumerate(points)}
    begins = [
        [(rank * capacity + row) * (1 + shares.width) for rank in ranks] for ranks in grid for row in range(capacity)
    ]
    losses = [[begin[k] + column for k, column in (place[i] for i in range(len(place)))] for begin in begins]
    return torch.tensor(losses, device=device), torch.tensor([begin[0] for begin in begins], device=device)


@functools.lru_cache(maxsize=64)
def shares(owners: tuple[int, ...], count: int) -> Shares:
    """The shares of some points; cached, so that the same arguments give the same object."""
    return Shares(owners, count)
