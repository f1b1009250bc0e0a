"""A fine-tune as a file: written from a run, loaded into a model, taken out of it again."""

from __future__ import annotations

import warnings
import weakref
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import ZeroBlockError, ZeroBlockWarning
from ..fused import Progress
from ..rerun import replay
from . import file
from .card import card

_bases: weakref.WeakKeyDictionary[nn.Module, dict[str, Tensor]] = weakref.WeakKeyDictionary()
"""Of every model that a journal was loaded into: the tensors it moved, as they were, on the CPU."""


def export(run: str | Path, out: str | Path, *, step: int | None = None) -> Path:
    """Write one shareable file: the run's records and a card that says what they are.

    The file says how many steps it holds, so that a part of it is not mistaken for the whole.

    Args:
        run: a run's folder, or a journal.
        out: the file to write, usually ``NAME.zbj``; it must not exist.
        step: records up to there; all by default.

    Returns:
        The path of the file.
    """
    path = Path(out)
    if path.exists():
        raise ZeroBlockError(f"{str(path)!r} is there already, and nothing is ever overwritten: give another name")
    contents = file.read(run, step)
    if contents.torn:
        warnings.warn(f"{run} ends with {contents.note}, which are left out", ZeroBlockWarning, stacklevel=2)
    if not contents.records:
        raise ZeroBlockError(f"{str(run)!r} has no steps to export")
    header = contents.header.replace(steps=len(contents.records), card="")
    header = header.replace(card=card(header, contents.records, Path(run)))
    path.parent.mkdir(parents=True, exist_ok=True)
    file.write(path, file.dump(header, contents.records))
    return path


def load(model: nn.Module, path: str | Path, *, force: bool = False, progress: Progress | None = None) -> None:
    """Bring a fine-tune into a model that holds its base weights, in place and bit for bit.

    The tensors that move are kept on the CPU for ``unload``: as much memory as they have.

    Args:
        model: with the base weights, on any device.
        path: an exported file, a journal, or a run's folder.
        force: accept other base weights and another version of the package.
        progress: called now and then with the fraction done.
    """
    if model in _bases:
        raise ZeroBlockError("a journal is loaded into this model already; zeroblock.unload(model) takes it out")
    contents = file.read(path)
    if contents.torn:
        warnings.warn(f"{path} ends with {contents.note}, which are left out", ZeroBlockWarning, stacklevel=2)
    flags = [(param, param.requires_grad) for param in model.parameters()]
    kept: dict[str, Tensor] = {}
    try:
        optimizer = contents.header.rebuild(model, force=force)
        walks = optimizer.restore == "subtract" or optimizer.fold > 1  # which write where no step was taken, too
        touched = {record.block for record in contents.records if record.finite or walks}
        names = [name for block in sorted(touched) for name in optimizer.blocks[block].params]
        kept = {name: optimizer.params[name].detach().cpu().clone() for name in names}
        replay(optimizer, contents.records, progress)
        optimizer.settle()
    except BaseException:
        _put(model, kept)
        raise
    finally:
        for param, flag in flags:
            param.requires_grad_(flag)
    _bases[model] = kept


def unload(model: nn.Module) -> None:
    """Return a model to the weights it had before ``load``, bit for bit."""
    if model not in _bases:
        raise ZeroBlockError("no journal is loaded into this model")
    _put(model, _bases.pop(model))


@torch.no_grad()
def _put(model: nn.Module, weights: dict[str, Tensor]) -> None:
    params = dict(model.named_parameters())
    for name, value in weights.items():
        params[name].copy_(value)
