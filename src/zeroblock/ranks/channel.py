"""The channel between ranks: gathers a small tensor from each, and names the ranks that do not answer."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ..errors import ZeroBlockError
from ..interrupt import held_back
from .layout import Ranks

PULSE_S = 1.0
"""Seconds between a waiting rank's checks whether another one has given up."""
POLL_S = 2e-5
"""Seconds between two polls of a message on the GPU."""
ROLL_CALL_S = 2.0
"""Seconds that ranks have to answer when one is missing."""
FAREWELL_S = 30.0
"""Seconds that a failing rank waits for the others to receive its message."""
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gathers one tensor per rank; torch 2.13 renamed it."""
AGAIN = "start the processes again; a run with a journal continues from it"


class Channel:
    """Sends the messages of one team.

    Args:
        ranks: the ranks that take part.
        device: the device of the weights.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks = ranks
        self.captures = device.type == "cuda" and _backend(ranks.group, "cuda") == "nccl"
        """Whether a message can be part of a step that is submitted to the GPU."""
        self.device = device if _backend(ranks.group, "cpu") is None or self.captures else torch.device("cpu")
        """The device of the messages."""
        if _backend(ranks.group, self.device.type) is None:
            raise ZeroBlockError(
                f"the process group cannot send messages of weights on {device}: "
                "init_process_group('cpu:gloo,cuda:nccl') can, from both kinds of devices"
            )
        self.over = ""
        """The reason why messages no longer come through; empty while they do."""
        self._store: Any = None
        with contextlib.suppress(Exception):  # without a store, which a backend may lack, no rank is named
            self._store = distributed_c10d.PrefixStore(
                "zeroblock", distributed_c10d._get_process_group_store(ranks.group)
            )

    def gather(self, message: Tensor) -> Tensor:
        """(ranks, *shape) the messages of all ranks, in rank order, on the host.

        Args:
            message: a tensor of the same shape and dtype on every rank.
        """
        out, work = self._begin(message)
        try:
            self._wait(work)
            return out.cpu().view(self.ranks.size, *message.shape)
        except RuntimeError as error:
            raise self.broken(error) from error

    def submit(self, message: Tensor, out: Tensor) -> Tensor:
        """The same on the GPU, on the current stream, without waiting: it can be captured.

        Args:
            message: (n,) on the device.
            out: (ranks·n,) receives the messages.
        """
        gather_into(out, message, group=self.ranks.group)
        return out

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order: anything that JSON can hold."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = self.gather(torch.tensor([len(data)])).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(data)] = data
        texts = self.gather(padded)
        return [json.loads(bytes(text[:n].tolist())) for text, n in zip(texts, lengths, strict=True)]

    def fail(self, message: Tensor, step: int, reason: str) -> None:
        """Tell the others that this rank has failed, without waiting long for them."""
        with contextlib.suppress(Exception):
            if self._store is not None:
                self._store.set(f"reason/{step}/{self.ranks.rank}", reason)
                self._store.set(f"failed/{step}", "")
            _, work = self._begin(message)
            try:
                self._wait(work, FAREWELL_S)
            except RuntimeError:
                self.over = f"this rank has failed, and the others could not be notified: {AGAIN}"
                self._give_up()

    def failure(self, step: int, failed: Sequence[int]) -> ZeroBlockError:
        """The error for a step that some ranks could not measure."""
        reasons = []
        for rank in failed:
            reason = "an error"
            with contextlib.suppress(Exception):
                if self._set(f"reason/{step}/{rank}"):
                    reason = self._store.get(f"reason/{step}/{rank}").decode()
            reasons.append(f"rank {self.ranks.names[rank]}: {reason}")
        return ZeroBlockError(f"step {step} was not taken, because of {'; '.join(reasons)}")

    def complain(self, step: int) -> None:
        """Raise if a rank has said that it failed in a step."""
        if self._set(f"failed/{step}"):
            failed = [rank for rank in range(self.ranks.size) if self._set(f"reason/{step}/{rank}")]
            raise self.failure(step, failed)

    def _begin(self, message: Tensor) -> tuple[Tensor, Any]:
        if self.over:
            raise ZeroBlockError(self.over)
        sent = message.to(self.device).contiguous().view(-1)
        out = sent.new_empty(self.ranks.size * len(sent))
        try:
            return out, gather_into(out, sent, group=self.ranks.group, async_op=True)
        except RuntimeError as error:
            raise self.broken(error) from error

    def _wait(self, work: Any, most_s: float = math.inf) -> None:
        """Wait for the others, and check now and then whether one of them, or the user, has given up."""
        end = time.monotonic() + most_s
        while True:
            pulse = time.monotonic() + PULSE_S
            while self.device.type == "cuda" and not work.is_completed() and time.monotonic() < pulse:
                time.sleep(POLL_S)  # NCCL's ``wait`` is for the stream: it returns at once
            try:
                if self.device.type == "cpu" or work.is_completed():
                    work.wait(datetime.timedelta(seconds=PULSE_S))
                    return
                raise RuntimeError("no answer from the other ranks")
            except RuntimeError:
                if work.is_completed():  # finished as the pulse ended, or ``wait`` raises its error
                    work.wait()
                    return
                if time.monotonic() > end or held_back() or self._set("broken"):
                    raise

    def _give_up(self) -> None:
        """Tell waiting ranks to give up, and that this rank is not the missing one."""
        with contextlib.suppress(Exception):
            if self._store is not None:
                self._store.set(f"here/{self.ranks.rank}", "")
                self._store.set("broken", "")

    def _set(self, key: str) -> bool:
        """Whether any rank has set a key of the group's store."""
        with contextlib.suppress(Exception):
            return self._store is not None and bool(self._store.check([key]))
        return False

    def broken(self, error: Exception) -> ZeroBlockError:
        """The error for a message that did not come through; calls the roll to name the missing ranks."""
        self._give_up()
        end = time.monotonic() + ROLL_CALL_S
        missing = list(range(self.ranks.size)) if self._set(f"here/{self.ranks.rank}") else []
        while missing and not held_back() and time.monotonic() < end:
            missing = [rank for rank in missing if not self._set(f"here/{rank}")]
            if missing:
                time.sleep(0.1)
        names = ", ".join(str(self.ranks.names[rank]) for rank in missing)
        who = {0: "a rank failed", 1: f"rank {names} no longer answers"}.get(
            len(missing), f"ranks {names} no longer answer"
        )
        first = str(error).strip().partition("\n")[0]
        self.over = f"{who}, and ranks take every step together: {AGAIN} ({type(error).__name__}: {first})"
        return ZeroBlockError(self.over)


def _backend(group: Any, kind: str) -> str | None:
    """The name of the library that carries a group's tensors on a kind of device; None if there is none."""
    try:
        return str(group._get_backend(torch.device(kind)).name()).lower()
    except RuntimeError:
        return None
