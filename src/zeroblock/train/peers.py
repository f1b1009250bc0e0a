"""The ranks of a run, and the messages between them besides the losses of a step.

Every rank takes the same steps.  One of them, the leader, writes the run's folder, and sends the others what it reads
there.  An error on one rank ends all of them.  Everything here also works in one process, which has no peers.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import ZeroBlockError
from .stop import Stopped

T = TypeVar("T")


class RankError(ZeroBlockError):
    """An error that ends all ranks.

    Args:
        message: the text, with the rank that failed unless all did.
        shown: whether this rank is the one that prints it.
    """

    def __init__(self, message: str, shown: bool) -> None:
        super().__init__(message)
        self.shown = shown


@dataclass(frozen=True)
class Peers:
    """The ranks of a run, seen from one of them.

    >>> Peers().each(lambda: 3)
    [3]

    Args:
        rank: the rank of this process.
        size: the number of ranks.
        leader: the rank that writes.
        channel: sends small tensors; see :class:`~zeroblock.ranks.channel.Channel`.
    """

    rank: int = 0
    size: int = 1
    leader: int = 0
    channel: Any = None

    @classmethod
    def here(cls) -> Peers:
        """The ranks of the current process group; a single process if there is none."""
        import torch
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        from ..ranks import Ranks
        from ..ranks.channel import Channel

        ranks = Ranks.of("data")
        assert ranks is not None
        return cls(dist.get_rank(), dist.get_world_size(), 0, Channel(ranks, torch.device("cpu")))

    def led_by(self, leader: int) -> Peers:
        """The same ranks with another leader."""
        return dataclasses.replace(self, leader=leader)

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader."""
        return self.rank == self.leader

    def each(self, work: Callable[[], T]) -> list[T]:
        """Call a function on every rank; every rank gets all results, in the order of ranks.

        If one rank fails, all fail: rank 0 prints a ZeroBlockError with the number of its rank; other errors are raised
        unchanged on the rank where they happened.

        Args:
            work: the function; its result must be picklable, and small, because every rank gets it.
        """
        if self.size == 1:
            return [work()]
        result, error = None, None
        try:
            result = work()
        except Exception as caught:
            error = caught
        answers = self._gather((result, _Failure.of(error)))
        failures = [(rank, failure) for rank, (_, failure) in enumerate(answers) if failure is not None]
        if not failures:
            return [answer for answer, _ in answers]
        if error is not None and not isinstance(error, (ZeroBlockError, Stopped)):
            raise error
        for _, failure in failures:
            if failure.stopped:
                raise Stopped(failure.text)
        rank, first = failures[0]
        alike = len(failures) == self.size and all(failure == first for _, failure in failures)
        message = first.text if alike else f"rank {rank}: {first.text}"
        raise RankError(message, self.rank == 0 and first.known) from error

    def together(self, work: Callable[[], T]) -> T:
        """Call a function on every rank, without exchanging the results; if one rank fails, all fail."""
        results: list[T] = []
        self.each(lambda: results.append(work()))
        return results[0]

    def first(self, work: Callable[[], T]) -> T:
        """Call a function on the leader; all ranks get its result, of any size, or its error."""
        if self.size == 1:
            return work()
        import torch.distributed as dist

        box: list[Any] = [None]
        self.each(lambda: box.__setitem__(0, work()) if self.leads else None)
        try:
            dist.broadcast_object_list(box, src=self.leader)
        except RuntimeError as error:
            raise ZeroBlockError(
                f"a rank was lost before the first step ({str(error).strip().partition(chr(10))[0]}): start again"
            ) from error
        return box[0]  # type: ignore[no-any-return]

    def agree(self, facts: Mapping[str, object], advice: str) -> None:
        """Raise an error that names the first rank whose facts differ from those of rank 0.

        Args:
            facts: values, by the name that the message gives them.
            advice: the fix, for the message.
        """
        if self.size == 1:
            return
        answers = self.each(lambda: {name: str(value) for name, value in facts.items()})
        for rank, answer in enumerate(answers):
            for name, value in answers[0].items():
                if answer.get(name) != value:
                    text = f"rank {rank} has {name} {answer.get(name)}, rank 0 has {value}: {advice}"
                    raise RankError(text, self.rank == 0)

    def _gather(self, value: Any) -> list[Any]:
        import torch

        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = self.channel.gather(torch.tensor([len(data)])).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(data)] = data
        rows = self.channel.gather(padded)
        return [pickle.loads(row[:n].numpy().tobytes()) for row, n in zip(rows, lengths, strict=True)]


@dataclass(frozen=True)
class _Failure:
    """An error in the form that is sent to the other ranks."""

    text: str
    known: bool
    stopped: bool

    @classmethod
    def of(cls, error: Exception | None) -> _Failure | None:
        if error is None:
            return None
        known = isinstance(error, ZeroBlockError)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        return cls(" ".join(text.split()), known, isinstance(error, Stopped))
