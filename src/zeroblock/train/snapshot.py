"""Snapshots: weights and optimizer state of one step, which shorten the replay of a resumed run.

A snapshot is never what a run depends on: one that is damaged, or of another run, is left alone.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch

from ..errors import ZeroBlockError
from ..journal import Record
from ..optimizer import ZeroOrder

WEIGHTS, STATE = "weights.safetensors", "state.pt"
PIECE = 1 << 24


def save(folder: Path, optimizer: ZeroOrder) -> None:
    """Write a snapshot in place of the one that is there; a kill leaves one of the two.

    Args:
        folder: where.
        optimizer: its parameters are the weights; it has taken a step.
    """
    assert optimizer.record is not None
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    new, old = folder.with_name(f"{folder.name}.part"), folder.with_name(f"{folder.name}.old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    try:
        save_file({name: param.detach().contiguous() for name, param in optimizer.params.items()}, new / WEIGHTS)
        state = {"optimizer": optimizer.state_dict(), "last": _told(optimizer.record), "crc": _crc(new / WEIGHTS)}
        torch.save(state, new / STATE)
        for file in (new / WEIGHTS, new / STATE):
            _sync(file)
    except (SafetensorError, RuntimeError, OSError) as error:  # a full disk, in the words of three libraries
        shutil.rmtree(new, ignore_errors=True)
        reason = str(error).strip().splitlines()[0]
        raise ZeroBlockError(
            f"the snapshot of step {optimizer.steps} could not be written to {folder} ({reason}): free some room, "
            f"then zeroblock resume {folder.parent}; the journal has lost nothing"
        ) from error
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)  # of a kill while it was being removed
        os.replace(folder, old)
    os.replace(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def load(folder: Path, optimizer: ZeroOrder, records: Sequence[Record]) -> str:
    """Bring an optimizer and its model to the snapshot's step, where there is a sound one.

    Args:
        folder: where it may be.
        optimizer: of the same run, at step 0.
        records: those to go by; a snapshot beyond them, or of another run, is left alone.

    Returns:
        Why a snapshot that is there was not used; empty otherwise.
    """
    from safetensors import safe_open

    places = (folder, folder.with_name(f"{folder.name}.old"))  # the old one, where a kill came between two renames
    place = next((place for place in places if (place / WEIGHTS).exists() and (place / STATE).exists()), None)
    if place is None:
        return ""
    try:
        found = torch.load(place / STATE, weights_only=True)
        state, last, crc = found["optimizer"], found["last"], found["crc"]
        steps = state["steps"]
    except Exception as error:  # whatever a library makes of bytes that are not its own
        return f"the snapshot is damaged ({type(error).__name__})"
    if steps > len(records):
        return ""
    if last != _told(records[steps - 1]):
        return "the snapshot is of another run"
    if crc != _crc(place / WEIGHTS):
        return "the snapshot is damaged (its checksum does not match)"
    device = next(iter(optimizer.params.values())).device
    with safe_open(place / WEIGHTS, "pt", device=str(device)) as weights, torch.no_grad():
        for name, param in optimizer.params.items():
            param.copy_(weights.get_tensor(name))
    optimizer.load_state_dict(state)
    return ""


def _told(record: Record) -> str:
    """What a journal keeps of a step."""
    return repr((record.step, record.block, record.coeffs, record.lr, record.loss))


def _crc(file: Path) -> int:
    found = 0
    with file.open("rb") as handle:
        while piece := handle.read(PIECE):
            found = zlib.crc32(piece, found)
    return found


def _sync(file: Path) -> None:
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
