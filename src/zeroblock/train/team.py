"""The ranks of a run: what they tell one another besides the losses of a step.

Every rank takes the same steps.  Rank 0 alone writes the run's folder; what it decides, the others hear.  An error of
one rank ends all of them with one message.  Everything here also works in one process, which is a team of one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import ZeroBlockError
from .stop import Stopped

T = TypeVar("T")
ROLL_CALL_SECONDS = 2.0
"""How long the ranks that are left wait for one another to find out who is missing."""


class RankError(ZeroBlockError):
    """An error that several ranks know of.

    Args:
        message: names the rank.
        shown: whether this rank is the one that prints it.
    """

    def __init__(self, message: str, shown: bool) -> None:
        super().__init__(message)
        self.shown = shown


@dataclass(frozen=True)
class Team:
    """The ranks of a run, as one of them sees them.

    >>> Team().each(lambda: 3)
    [3]

    Args:
        rank: of this process.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def here(cls) -> Team:
        """The ranks of the process group that is up; a team of one if there is none."""
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def leads(self) -> bool:
        """Whether this rank writes and decides."""
        return self.rank == 0

    def each(self, work: Callable[[], T]) -> list[T]:
        """Do something on every rank; all of them get all results, in the order of ranks.

        If a rank fails, all fail: an error of the user's making is printed once, by rank 0, with the name of its rank;
        others are raised as they are where they happened.

        Args:
            work: done here; its result must be picklable.
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
        raise RankError(first.text if alike else f"rank {rank}: {first.text}", self.leads and first.known) from error

    def first(self, work: Callable[[], T]) -> T:
        """Do something on rank 0; all ranks get its result, or its error."""
        return self.each(lambda: work() if self.leads else None)[0]  # type: ignore[return-value]

    def agree(self, facts: Mapping[str, object], advice: str) -> None:
        """Refuse a rank whose facts are not those of rank 0, by its number.

        Args:
            facts: by the name that the message gives them.
            advice: how to mend it.
        """
        answers = self.each(lambda: {name: str(value) for name, value in facts.items()})
        for rank, answer in enumerate(answers):
            for name, value in answers[0].items():
                if answer.get(name) != value:
                    raise RankError(
                        f"rank {rank} has {name} {answer.get(name)}, rank 0 has {value}: {advice}", self.leads
                    )

    def _gather(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, value)
        return answers

    @contextlib.contextmanager
    def contact(self, seconds: float, advice: str) -> Iterator[None]:
        """Turn the loss of a rank into one line that names it.

        Args:
            seconds: after which a rank that does not answer is lost, for the message.
            advice: how to go on.
        """
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not _is_network(error):
                raise
            present = self._roll_call()
            missing = sorted(set(range(self.size)) - present)
            late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
            who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}" if missing else "a rank"
            verb = "do" if len(missing) > 1 else "does"
            text = (
                f"{who} {verb} not answer within {seconds:g} s (stopped, or cut off)"
                if late
                else f"lost {who} (killed, or cut off)"
            )
            raise RankError(f"{text}: {advice}", self.rank == min(present)) from error

    def _roll_call(self) -> set[int]:
        """The ranks that are still here, this one among them; they find one another in the group's store."""
        import torch.distributed as dist

        present = {self.rank}
        with contextlib.suppress(Exception):  # the store may be lost, too
            store: Any = dist.distributed_c10d._get_default_store()
            store.set(f"zeroblock/present/{self.rank}", b"")
            end = time.monotonic() + ROLL_CALL_SECONDS
            while len(present) < self.size - 1 and time.monotonic() < end:
                others = set(range(self.size)) - present
                present |= {rank for rank in others if store.check([f"zeroblock/present/{rank}"])}
                time.sleep(0.02)
        return present


@dataclass(frozen=True)
class _Failure:
    """An error as the other ranks hear of it."""

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


def _is_network(error: RuntimeError) -> bool:
    """Whether an error is one of the connection between ranks."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "nccl" in str(error).lower()
