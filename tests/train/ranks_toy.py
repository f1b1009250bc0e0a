"""What the ranks of a test do: runs as the library has them, and the command line as torchrun starts it."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import nn
from torch.distributed.fsdp import fully_shard

from zeroblock.engine import Engine, objective
from zeroblock.method import METHODS
from zeroblock.model import load
from zeroblock.report.view import Progress, Quiet
from zeroblock.shard import whole
from zeroblock.task.encoding import Encoded
from zeroblock.train import Config, joint, make, meeting, resume, run
from zeroblock.train.meeting import Meetings
from zeroblock.train.peers import Peers
from zeroblock.train.session import Session
from zeroblock.train.stop import Stop, Stopped

PRELOAD = (
    "ranks_toy", "zeroblock.cli", "zeroblock.train.loop", "transformers.models.llama.modeling_llama",
    "torch.distributed.fsdp", "torch._dynamo",
)  # fmt: skip
"""Modules that ranks import once, together."""


class StopAt(Quiet):
    """Sends its own rank a signal after some step."""

    def __init__(self, step: int) -> None:
        self.at = step

    def step(self, progress: Progress) -> None:
        if progress.step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


def digest(model: nn.Module) -> str:
    """A hash of every bit of the weights."""
    state = hashlib.sha256()
    for name, param in model.named_parameters():
        state.update(name.encode() + whole(param).contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def travelled(
    how: str,
    values: dict[str, Any],
    out: str,
    *,
    writer: int = 0,
    stop: tuple[int, int] | None = None,
    own: dict[int, dict[str, Any]] | None = None,
    version: dict[int, str] | None = None,
    flip: tuple[int, int] | None = None,
    freeze: tuple[int, int, float] | None = None,
) -> tuple[int, str, int, str]:
    """Make or resume a run; the ranks besides ``writer`` have no folder of it.

    Args:
        how: run, make or resume.
        values: the settings.
        out: the folder.
        writer: the rank that has it.
        stop: a rank, and the step after which it gets a signal.
        own: settings that some ranks have in place of these.
        version: of zeroblock, of some ranks.
        flip: a rank, and the step after which one bit of its weights changes.
        freeze: a rank, the step after which it is stopped, and the seconds until it is killed.

    Returns:
        Steps, why it stopped, the status, a digest of the weights.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    values = values | (own or {}).get(rank, {})
    folder = out if rank == writer else f"{out}-of-nobody"
    models: list[nn.Module] = []
    view = StopAt(stop[1]) if stop is not None and stop[0] == rank else Quiet()
    with pytest.MonkeyPatch.context() as patch:
        prepare, on_step = joint.prepare, Session._on_step

        def spy(*arguments: Any, **options: Any) -> Any:
            workload = prepare(*arguments, **options)
            models.append(workload.model)
            return workload

        def meddling(self: Session, record: Any) -> None:
            on_step(self, record)
            if freeze is not None and (rank, record.step) == freeze[:2]:
                subprocess.Popen(["sh", "-c", f"sleep {freeze[2]}; kill -KILL {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            if flip is not None and (rank, record.step) == flip:
                next(models[-1].parameters()).data.view(-1)[5].mul_(1 + 2**-23)

        patch.setitem(sys.modules, "matplotlib", None)  # no figures: half the time
        patch.setattr(meeting, "MEETING_SECONDS", 0.0)  # after every step: how fast ranks are does not matter
        patch.setattr(joint, "prepare", spy)
        patch.setattr(Session, "_on_step", meddling)
        patch.setattr(joint, "__version__", (version or {}).get(rank, joint.__version__))
        result = (
            resume(folder, view)
            if how == "resume"
            else {"run": run, "make": make}[how](Config.of(values), folder, view)
        )
    return result.steps, result.reason, result.code, digest(models[-1])


def met() -> list[bool]:
    """Whether ranks stop, at two meetings after the end of the time, of which only some ranks think it counts."""
    stopped = []
    for believer in range(2):
        try:
            Meetings(Peers.here(), Stop(0.0)).check(1, clock=dist.get_rank() == believer, left=float)
            stopped.append(False)
        except Stopped:
            stopped.append(True)
    return stopped


def passes(path: str) -> list[int]:
    """Forward passes of a sharded model for two probes, on a short batch and on a long one."""
    model, counts = load(path, "fp32", "cpu"), []
    fully_shard(model)
    optimizer = METHODS["mezo_bcd"](model, lr=0.0, probes=2, parallel="data")
    engine = Engine(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objective, "POINT_TOKENS", 64)
        for size in (3, 30):
            calls: list[int] = []
            hook = model.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
            engine.objective([Encoded((5,) * size, ((6,), (7,)))], [0]).measure(optimizer.plan().points)
            hook.remove()
            counts.append(len(calls))
    return counts


def commanded(arguments: list[str], kills: list[tuple[int, int]]) -> None:
    """A rank of torchrun with the command line; the n-th start ends when a rank kills itself after a step.

    Args:
        arguments: of the command.
        kills: a rank and a step, for every start.
    """
    from zeroblock.cli import main

    rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    on_step = Session._on_step

    def deadly(self: Session, record: Any) -> None:
        on_step(self, record)
        if start < len(kills) and kills[start][0] == rank and record.step >= kills[start][1]:
            os.kill(os.getpid(), signal.SIGKILL)

    Session._on_step = deadly  # type: ignore[method-assign]
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # no figures
    sys.argv = ["zeroblock", *arguments]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise


def made(values: dict[str, Any]) -> list[str]:
    """The flags of some settings."""
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    with Pool(2, preload=PRELOAD) as pool:
        yield pool


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    with Pool(4, preload=PRELOAD) as pool:
        yield pool


def absent(out: Path) -> bool:
    """Whether the ranks that do not write have written nothing."""
    return not Path(f"{out}-of-nobody").exists()
