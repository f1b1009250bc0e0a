"""Snapshots: weights and optimizer state of one step, which shorten the replay of a resumed run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from ..errors import ZeroBlockError
from ..optimizer import ZeroOrder

WEIGHTS, STATE = "weights.safetensors", "state.pt"


def save(folder: Path, optimizer: ZeroOrder) -> None:
    """Write a snapshot in place of the one that is there; a kill leaves one of the two.

    Args:
        folder: where.
        optimizer: its parameters are the weights.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    new, old = folder.with_name(f"{folder.name}.part"), folder.with_name(f"{folder.name}.old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    try:
        save_file({name: param.detach().contiguous() for name, param in optimizer.params.items()}, new / WEIGHTS)
        torch.save(optimizer.state_dict(), new / STATE)
    except (SafetensorError, RuntimeError, OSError) as error:  # a full disk, in the words of three libraries
        shutil.rmtree(new, ignore_errors=True)
        reason = str(error).strip().splitlines()[0]
        raise ZeroBlockError(
            f"the snapshot of step {optimizer.steps} could not be written to {folder} ({reason}): free some room, "
            f"then zeroblock resume {folder.parent}; the journal has lost nothing"
        ) from error
    if folder.exists():
        os.replace(folder, old)
    os.replace(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def load(folder: Path, optimizer: ZeroOrder, most: int) -> bool:
    """Bring an optimizer and its model to the snapshot's step.

    Args:
        folder: where it may be.
        optimizer: of the same run, at step 0.
        most: the steps that the journal knows of; a snapshot beyond them is left alone.

    Returns:
        Whether there was one.
    """
    from safetensors.torch import load_file

    places = (folder, folder.with_name(f"{folder.name}.old"))  # the old one, where a kill came between two renames
    place = next((place for place in places if (place / WEIGHTS).exists() and (place / STATE).exists()), None)
    if place is None:
        return False
    state = torch.load(place / STATE, weights_only=True)
    if state["steps"] > most:
        return False
    device = next(iter(optimizer.params.values())).device
    weights = load_file(place / WEIGHTS, device=str(device))
    with torch.no_grad():
        for name, param in optimizer.params.items():
            param.copy_(weights[name])
    optimizer.load_state_dict(state)
    return True
