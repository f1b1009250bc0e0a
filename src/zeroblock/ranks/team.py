"""A team: the ranks of one optimizer, the settings they agree on, and the stages of a step that they share."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..direction import Point
from ..errors import ZeroBlockError, ZeroBlockWarning
from ..shard import held_alike, whole
from .channel import Channel
from .checksum import checksum
from .layout import Ranks
from .message import FAILED, Shares, Weight, amounts_of, common_unit, mean, shares


class Team:
    """The ranks that take an optimizer's steps together.

    Each rank sends the facts that all must have in common at the first step, one row of numbers per micro-batch
    at every step, 8·(1 + points) bytes, and a checksum of 8 bytes every ``ranks.every`` steps.

    Args:
        ranks: the ranks that take part.
        params: the weights that are optimized, by name.
    """

    def __init__(self, ranks: Ranks, params: Mapping[str, Tensor]) -> None:
        self.ranks, self.params = ranks, params
        self.introduced = False
        """Whether the ranks have compared the facts that must be equal."""
        self.capacity = 1
        """Micro-batches per rank that a message has room for."""
        self.unit: str | None = None
        """The unit that losses are means over, if all ranks have the same."""
        self.submits = False
        """Whether steps are submitted to the GPU, the message with them; then every rank has one micro-batch."""
        self._channel: Channel | None = None

    @property
    def channel(self) -> Channel:
        """The channel for messages, made for the device that the weights are on at first use."""
        if self._channel is None:
            self._channel = Channel(self.ranks, next(iter(self.params.values())).device)
        return self._channel

    def introduce(
        self, facts: Mapping[str, object], weights: Sequence[Weight | None], every: Iterable[Tensor], submits: bool
    ) -> None:
        """Compare with the other ranks everything that must be equal, once, before the first step.

        Args:
            facts: this rank's facts, by name.
            weights: weights of this rank's micro-batches at the first step.
            every: all tensors of the model, whose checksum is a fact, too.
            submits: whether this rank could submit its steps to the GPU.
        """
        own = {name: str(fact) for name, fact in facts.items()} | {
            "weights": f"{checksum(held_alike(every, self.ranks.names)):016x}"
        }
        unit = common_unit([None if weight is None else weight[0] for weight in weights])
        ready = submits and self.channel.captures and len(weights) == 1
        told = self.channel.exchange({"facts": own, "unit": unit, "count": len(weights), "submits": ready})
        self._compare([one["facts"] for one in told])
        self.unit = common_unit([one["unit"] for one in told if one["count"]])
        self.capacity = max(1, *(one["count"] for one in told))
        self.submits = all(one["submits"] for one in told)
        self.introduced = True
        if submits and not self.channel.captures:
            warnings.warn(
                "the process group cannot send a message as part of a step on the GPU, so every step waits for the "
                "host: init_process_group('nccl') can, with one GPU per rank",
                ZeroBlockWarning,
                stacklevel=4,
            )

    def _compare(self, facts: list[dict[str, str]]) -> None:
        for name in {name: None for one in facts for name in one}:
            values = [one.get(name, "nothing") for one in facts]
            if len(set(values)) > 1:
                raise ZeroBlockError(
                    f"ranks that take steps together need the same {name}: {self._groups(values)}"
                    + ("; load the same base weights on every rank" if name == "weights" else "")
                )

    def _groups(self, values: Sequence[str]) -> str:
        """The ranks that have each value, in words; the most common value first."""
        groups: dict[str, list[int]] = {}
        for rank, value in zip(self.ranks.names, values, strict=True):
            groups.setdefault(value, []).append(rank)
        ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
        named = ((f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have", value)
                 for value, ranks in ordered)  # fmt: skip
        return ", ".join(f"{who} {value}" for who, value in named)

    def shares(self, points: Sequence[Point]) -> Shares:
        """The points that each share measures."""
        probes: dict[int, int] = {}
        owners = tuple(probes.setdefault(id(point.direction), len(probes)) for point in points)
        return shares(owners, len(self.ranks.grid[0]))

    def mine(self, points: Sequence[Point]) -> tuple[tuple[int, ...], ...]:
        """Indices of the points that this rank measures, in the groups that are measured together."""
        found = self.shares(points)
        share = self.ranks.place[1]
        return found.probes(share) if self.ranks.by_probe else found.points[share : share + 1]

    def admit(self, count: int, step: int) -> None:
        """Refuse several micro-batches in a step of a run whose steps are submitted with one per rank."""
        if self.submits and count > 1:
            raise ZeroBlockError(
                f"this rank has {count} micro-batches at step {step}, and steps that are submitted to GPUs have one "
                "per rank: give one in every step, or a list of several from the first step on"
            )

    def gather(self, points: Sequence[Point], losses: Tensor, weights: Sequence[Weight | None], step: int) -> Tensor:
        """(points,) the mean loss of all micro-batches of all ranks at each point, on the host.

        Args:
            points: the points of the step.
            losses: (micro-batches, points of this rank) in fp64.
            weights: (micro-batches,) see :data:`Weight`.
            step: number of the step.
        """
        found, amounts = self.shares(points), amounts_of(weights, self.unit)
        while True:
            table = self.channel.gather(found.pack(losses.cpu(), amounts, self.capacity))
            codes = table[:, 0, 0].tolist()
            failed = [rank for rank, code in enumerate(codes) if code == FAILED]
            if failed:
                raise self.channel.failure(step, failed)
            wanted = max((int(FAILED - code) for code in codes if code < FAILED), default=0)
            if wanted <= self.capacity:
                return mean(*found.unpack(table, self.ranks.grid))
            self.capacity = wanted

    def submit(self, points: Sequence[Point], losses: Tensor, amount: Tensor, live: bool = True) -> Tensor:
        """The same on the GPU, without waiting: every rank has one micro-batch.

        Args:
            points: the points of the step.
            losses: (points of this rank,) on the device.
            amount: (1,) fp64 on the device; see :meth:`amount`.
            live: whether to send; otherwise this rank's losses stand for those of all, to compile kernels.
        """
        found = self.shares(points)
        rest = losses.new_zeros(found.width - len(losses), dtype=torch.float64)
        row = torch.cat([amount, losses.double(), rest])
        out = row.new_empty(self.ranks.size * len(row)) if live else row.repeat(self.ranks.size)
        if live:
            self.channel.submit(row, out)
        return mean(*found.unpack(out.view(self.ranks.size, 1, -1), self.ranks.grid))

    def amount(self, weight: Weight | None) -> float:
        """The amount of a micro-batch in the mean; NaN if it is not a mean over the unit of all ranks."""
        return amounts_of([weight], self.unit)[0]

    @contextlib.contextmanager
    def telling(self, points: Sequence[Point], step: int) -> Iterator[None]:
        """A context in which an error on this rank ends the step on all ranks, with its reason."""
        try:
            yield
        except BaseException as error:
            message = self.shares(points).pack(torch.empty(0, 0), [], self.capacity)
            message[0, 0], message[:, 1:] = FAILED, torch.nan
            first = str(error).strip().partition("\n")[0][:200]
            self.channel.fail(message, step, f"{type(error).__name__}: {first}" if first else type(error).__name__)
            raise

    def hear(self, step: int) -> None:
        """Raise if a submitted step, whose loss was not finite, failed on another rank."""
        if self.submits:
            self.channel.complain(step)

    def agree(self, step: int) -> int:
        """Raise unless the weights of all ranks are equal to the bit, naming the ranks that differ.

        Sharded weights are gathered for it, tensor by tensor, so the checksum is of whole tensors.

        Args:
            step: number of steps taken, for the message.

        Returns:
            The checksum of the weights.
        """
        own = checksum(map(whole, self.params.values()))
        sums = self.channel.gather(torch.tensor([own - (1 << 64) if own >> 63 else own])).flatten().tolist()
        if len(set(sums)) > 1:
            told = self._groups([f"{value % (1 << 64):016x}" for value in sums])
            raise ZeroBlockError(
                f"the weights of the ranks differ after {step} steps: {told} (checksums); do not save these weights, "
                "and continue all ranks from the journal or the last snapshot"
            )
        return own
