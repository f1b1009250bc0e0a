"""Weights on the disk: snapshots, which shorten the replay of a resumed run, and folders for ``from_pretrained``.

A snapshot holds the weights and the optimizer's state of one step.  A run never depends on it: a snapshot
that is damaged, or belongs to another run, is ignored.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import atomic, quantise
from ..errors import ZeroBlockError
from ..journal import Record
from ..optimizer import ZeroOrder
from ..shard import local

WEIGHTS, STATE = "weights.safetensors", "state.pt"
CHUNK_BYTES = 1 << 24
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES[quantise.BYTES] = "F8_E4M3"
"""The names of dtypes in a safetensors file."""


def save(folder: Path, optimizer: ZeroOrder, *, writes: bool = True) -> None:
    """Write a snapshot in place of the previous one; a kill leaves one of the two.

    If the weights are sharded, every process calls this, and the file holds whole tensors, which any number of
    processes can load.  A rule's sharded state is useless to other processes, so such a run writes no snapshot.

    Args:
        folder: the snapshot's folder.
        optimizer: the optimizer of the weights, after at least one step.
        writes: whether this process is the one that writes.
    """
    assert optimizer.record is not None
    sharded = bool(optimizer.weights.boxes)
    if not (writes or sharded):
        return
    state = optimizer.state_dict()
    if sharded and _holds_tensors(state):
        return
    state.pop("shards", None)
    weights = {name: _whole(optimizer, name, writes) for name in optimizer.params}
    if not writes:
        return
    from safetensors.torch import save_file

    advice = f"then zeroblock resume {folder.parent}; the journal has lost nothing"
    with _replacing(folder, f"the snapshot of step {optimizer.steps}", advice) as new:
        save_file(weights, new / WEIGHTS)
        content = {"optimizer": state, "last": _identity(optimizer.record), "crc": _crc(new / WEIGHTS)}
        torch.save(content, new / STATE)


def _holds_tensors(state: dict[str, Any]) -> bool:
    """Whether an optimizer's state has tensors, which are sharded if the weights are."""
    values = (value for one in state["state"].values() for value in one.values())
    return bool(state.get("held")) or any(isinstance(value, torch.Tensor) for value in values)


def _whole(optimizer: ZeroOrder, name: str, kept: bool) -> torch.Tensor:
    """A whole tensor of the weights; a gathered one goes to the host, or is dropped unless it is to be kept."""
    whole = optimizer.weights.whole(name).contiguous()
    if name in optimizer.weights.boxes:
        whole = whole.cpu() if kept else whole.new_empty(0)
    return whole


def save_model(folder: Path, model: Any, tokenizer: Any, step: int) -> None:
    """Write a folder for ``from_pretrained`` in place of the previous one; a kill leaves one of the two.

    Args:
        folder: the folder to write.
        model: a model of transformers.
        tokenizer: the model's tokenizer.
        step: the step of the weights, for messages.
    """
    from .. import model as models

    with _replacing(folder, f"the weights of step {step}", "then start the run again") as new:
        models.save(model, new, tokenizer)


@contextlib.contextmanager
def _replacing(folder: Path, what: str, advice: str) -> Iterator[Path]:
    """A new folder that replaces another one on exit; a kill leaves one of the two.

    Args:
        folder: the folder to replace.
        what: the name of the content, for the message if the disk is full.
        advice: the end of that message, for after the space is freed.
    """
    from safetensors import SafetensorError

    old = folder.with_name(f"{folder.name}.old")
    atomic.remove_draft_folders(folder.parent)  # left by this process, if a signal interrupted a write
    new = folder.parent / f".snapshot.{secrets.token_hex(4)}.part"
    try:
        new.mkdir()
        yield new
        for file in new.iterdir():
            _sync(file)
    except (SafetensorError, RuntimeError, OSError) as error:  # how three libraries report a full disk
        shutil.rmtree(new, ignore_errors=True)
        reason = str(error).strip().splitlines()[0]
        raise ZeroBlockError(
            f"{what} could not be written to {folder} ({reason}): free some space, {advice}"
        ) from error
    if folder.exists() or folder.is_symlink():
        _remove(old)  # left by a process that was killed while removing it
        os.replace(folder, old)
    os.replace(new, folder)
    _remove(old)


def load(folder: Path, optimizer: ZeroOrder, records: Sequence[Record]) -> str:
    """Bring an optimizer and its model to the snapshot's step, if there is a valid snapshot.

    Args:
        folder: the snapshot's folder, which need not exist.
        optimizer: an optimizer of the same run, at step 0.
        records: the steps to compare with; a snapshot beyond them, or of another run, is ignored.

    Returns:
        The reason why a snapshot could not be used; empty otherwise.
    """
    from safetensors import safe_open

    places = (folder, folder.with_name(f"{folder.name}.old"))  # the old one, after a kill between two renames
    place = next((place for place in places if (place / WEIGHTS).exists() and (place / STATE).exists()), None)
    if place is None:
        return ""
    try:
        content = torch.load(place / STATE, weights_only=True)
        state, last, crc = content["optimizer"], content["last"], content["crc"]
        steps = state["steps"]
        if type(steps) is not int or steps < 1:
            raise TypeError(f"steps is {steps!r}")
    except Exception as error:  # libraries raise all kinds of errors on foreign bytes
        return f"the snapshot is damaged ({type(error).__name__})"
    if steps > len(records):
        return ""
    if last != _identity(records[steps - 1]):
        return "the snapshot is of another run"
    if crc != _crc(place / WEIGHTS):
        return "the snapshot is damaged (its checksum does not match)"
    if optimizer.weights.boxes:
        if _holds_tensors(state):
            return "the snapshot holds the state of whole tensors, and these are sharded"
        state["shards"] = optimizer.weights.layout()
    device = next(iter(optimizer.params.values())).device
    before = optimizer.state_dict()
    with contextlib.ExitStack() as stack:
        try:
            weights = stack.enter_context(safe_open(place / WEIGHTS, "pt", device=str(device)))
            _check(weights, optimizer)
            optimizer.load_state_dict(state)
        except Exception as error:
            optimizer.load_state_dict(before)
            return f"the snapshot is damaged ({' '.join(str(error).split())})"
        with torch.no_grad():  # everything has been checked
            for name, param in optimizer.params.items():
                box, value = optimizer.weights.boxes.get(name), weights.get_tensor(name)
                local(param).copy_(value if box is None else value[box.slices])
    return ""


def _check(weights: Any, optimizer: ZeroOrder) -> None:
    """Refuse a file that lacks a tensor, or has one of another shape or dtype."""
    names = set(weights.keys())
    for name, param in optimizer.params.items():
        if name not in names:
            raise ValueError(f"it lacks the tensor {name}")
        entry = weights.get_slice(name)
        if tuple(entry.get_shape()) != tuple(param.shape) or entry.get_dtype() != DTYPES.get(param.dtype):
            raise ValueError(f"its tensor {name} is {entry.get_dtype()} of shape {tuple(entry.get_shape())}")


def _identity(record: Record) -> str:
    """The part of a record that a journal keeps, as text."""
    return repr((record.step, record.block, record.coeffs, record.lr, record.loss))


def _remove(place: Path) -> None:
    """Remove a folder, or a link in its place."""
    if place.is_symlink():
        place.unlink()
    else:
        shutil.rmtree(place, ignore_errors=True)


def _crc(file: Path) -> int:
    crc = 0
    with file.open("rb") as handle:
        while chunk := handle.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


def _sync(file: Path) -> None:
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
