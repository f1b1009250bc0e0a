"""A process that is killed while weights are being written: what it left at rest is never read again."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loop_toy import kept, settings

from toy import same, snapshot
from zeroblock.offload.lane import Lane
from zeroblock.rule import SGD
from zeroblock.train import Config, resume, run

_process = multiprocessing.get_context("spawn").Process


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_an_update(step: int) -> None:
    """Be killed in a step, when half of a block's tensors have moved in the file."""
    update, count = SGD.update_, 0

    def half(self: SGD, members: Any, state: Any, move: Any) -> None:
        nonlocal count
        count += 1
        if count <= step:
            return update(self, members, state, move)
        update(self, members[: len(members) // 2], state, move)
        _die()

    SGD.update_ = half  # type: ignore[method-assign]


def _die_in_a_write_back(step: int) -> None:
    """Be killed when half of a layer's bytes are back where it rests."""
    put_back, count = Lane.put_back, 0

    def half(self: Lane, buffer: Any, target: Any, spans: Any, written: Any) -> None:
        nonlocal count
        count += 1
        if count <= step:
            return put_back(self, buffer, target, spans, written)
        start, stop = spans[0]
        put_back(self, buffer, target, [(start, (start + stop) // 2)], written)
        self.finish()
        _die()

    Lane.put_back = half  # type: ignore[method-assign]


def _sit(die: Callable[[int], None], step: int, config: Config, out: Path) -> None:
    """One sitting of a run, which ends in the middle of a write."""
    die(step)
    if out.exists():
        resume(out)
    else:
        run(config, out)


@pytest.mark.parametrize(
    ("device", "offload", "die"),
    [
        ("cpu", "disk", _die_in_an_update),
        pytest.param("cuda", "host", _die_in_a_write_back, marks=pytest.mark.gpu),
        pytest.param("cuda", "disk", _die_in_a_write_back, marks=pytest.mark.gpu),
    ],
)
def test_a_run_goes_on_after_kill_9_in_a_write(
    llama: Path, data: Path, tmp_path: Path, models: list[Any], device: str, offload: str, die: Any
) -> None:
    config = settings(llama, data, device=device, dtype="bf16", steps=8, eval_every=4, eval_limit=10, offload=offload)
    run(config, tmp_path / "whole")
    sizes = [0]
    for step in (2, 4):  # the second sitting goes on, and is killed, too
        child = _process(target=_sit, args=(die, step, config, tmp_path / "killed"))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        sizes.append((tmp_path / "killed" / "journal.zbj").stat().st_size)
    assert sizes == sorted(set(sizes)), "a sitting took no step"
    resume(tmp_path / "killed")
    assert kept(tmp_path / "killed") == kept(tmp_path / "whole")
    assert same(snapshot(models[0]), snapshot(models[-1]))
