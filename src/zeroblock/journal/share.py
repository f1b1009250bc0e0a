"""A fine-tune as a file: written from a run, loaded into a model, taken out of it again."""

from __future__ import annotations

import json
import re
import warnings
import weakref
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from .. import hub
from ..errors import ZeroBlockError, ZeroBlockWarning, shown
from ..fused import Progress
from ..optimizer import ZeroOrder
from ..shard import Gathering, local
from . import disk, finite, format
from .base import Base
from .card import card
from .format import Contents
from .header import MAX_STEPS, Header

_bases: weakref.WeakKeyDictionary[nn.Module, dict[str, Tensor]] = weakref.WeakKeyDictionary()
"""For every model that a journal was loaded into, the original values of the tensors that it moved, on the CPU."""


ABSOLUTE = re.compile(r"(?:file:|[A-Za-z]:)?[/\\]|~")
ABSOLUTE_WITHIN = re.compile(
    r"""(?<![^\s"'`=,:;(<\[{|])"""  # at the beginning of a word
    r"""(?:file:/+|~[\w.-]*[/\\]|[A-Za-z]:[/\\]|/(?!/)|\\\\?)"""  # the two slashes of https:// are no path
    r"""[^\s"'`,;)>\]}|]+"""
)
"""A path within a text: it ends at a space, so the rest of a folder's name after a space remains."""


def export(run: str | Path, out: str | Path, *, step: int | None = None) -> Path:
    """Write one shareable file: the run's records and a card that describes them.

    The file states its number of steps, so that a part of it is not mistaken for the whole.  It names the base by
    its hub id or by the last part of its path: no folder of this machine is in it.

    Args:
        run: a run's folder, or a journal.
        out: the file to write, usually ``NAME.zbj``; it must not exist.
        step: export the records up to this step; all by default.

    Returns:
        The path of the file.
    """
    path = Path(out)
    if path.exists():
        raise ZeroBlockError(f"{str(path)!r} exists already, and nothing is ever overwritten: give another name")
    contents = format.read(run, step)
    if step is None:
        check_whole(contents, run, way="--step {steps}")
    if not contents.records:
        raise ZeroBlockError(f"{str(run)!r} has no steps to export")
    header = public(contents.header).replace(steps=len(contents.records), card="")
    header = header.replace(card=card(header, contents.records, Path(run)))
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.write(path, format.dump(header, contents.records))
    return path


@overload
def load(
    model: nn.Module, path: str | Path, *, force: bool = False, progress: Progress | None = None, device: str = "auto"
) -> None: ...
@overload
def load(
    model: str | Path,
    path: None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
    device: str = "auto",
) -> nn.Module: ...
def load(
    model: nn.Module | str | Path,
    path: str | Path | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
    device: str = "auto",
) -> nn.Module | None:
    """Load a fine-tune into a model that holds its base weights, in place and bit for bit.

    The tensors that move are kept on the CPU for ``unload``, which takes as much memory as they do.  If a model's
    weights are sharded, every process calls this and moves its own shards.

        zb.load(model, "tuned.zbj")         # into a model with the base weights
        zb.load(model, "ann/tuned")         # the same, from the hub
        model = zb.load("ann/tuned")        # with the base that the journal names

    No code and no pickle is read, not even from the hub: a journal is numbers, and the base is read from safetensors
    or GGUF.

    Args:
        model: a model with the base weights, on any device; or the journal, if zeroblock is to load its base.
        path: an exported file, a journal, a run's folder, or a repository ``user/name`` of the hub; all steps in it
            are taken, whereas ``zeroblock replay`` and ``export`` stop at the step that dev selects.
        force: accept other base weights, a newer version of the package, or a damaged last record.
        progress: called now and then with the fraction done.
        device: the device of a base that zeroblock loads: auto, cpu, cuda or cuda:N.

    Returns:
        The model, if zeroblock loaded its base; else nothing.
    """
    if isinstance(model, nn.Module):
        if path is None:
            raise ZeroBlockError("load(model) lacks the journal: zeroblock.load(model, FILE), or user/name of the hub")
        _bring(model, _opened(path, force), force, progress)
        return None
    if path is not None:
        raise ZeroBlockError("load takes a model of torch and a journal, or a journal alone: load the model first")
    contents = _opened(model, force)
    run = format.locate(model).parent if is_own(contents, model) else None
    base = Base(contents.header, device=device, random_weights=force, run=run)
    try:
        base.check()
        module = base.load()
    except ZeroBlockError as error:
        raise ZeroBlockError(
            f"the base of {shown(model)} could not be loaded: {error}; or load it yourself, then "
            f"zeroblock.load(model, {shown(model)!r})"
        ) from error
    _bring(module, contents, force, progress)
    return module


def _opened(place: str | Path, force: bool) -> Contents:
    """Read a whole journal from this machine or from the hub."""
    path = hub.find(place)
    contents = format.read(path)
    check_whole(contents, path, way="force=True", force=force)
    return contents


def _bring(model: nn.Module, contents: Contents, force: bool, progress: Progress | None) -> None:
    """Take the steps of a journal in a model with its base weights; restore these if anything fails."""
    if model in _bases:
        raise ZeroBlockError("a journal is loaded into this model already; zeroblock.unload(model) takes it out")
    Gathering(model)
    flags = [(param, param.requires_grad) for param in model.parameters()]
    kept: dict[str, Tensor] = {}

    def restart() -> ZeroOrder:
        _put(model, kept)
        return contents.header.rebuild(model, force=True)

    try:
        optimizer = contents.header.rebuild(model, force=force)
        walks = optimizer.restore == "subtract" or optimizer.fold > 1  # then skipped steps write weights, too
        records = contents.records
        touched = set((records.block if walks else records.block[records.finite]).tolist())
        names = [name for block in sorted(touched) for name in optimizer.blocks[block].params]
        kept.update({name: local(optimizer.params[name]).detach().cpu().clone() for name in names})
        finite.advance(optimizer, records, restart, progress)
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
    Gathering(model)  # drops the weights that forward passes have gathered from shards
    params = dict(model.named_parameters())
    for name, value in weights.items():
        local(params[name]).copy_(value)


def check_whole(contents: Contents, place: str | Path, *, way: str, force: bool = False) -> None:
    """Refuse a journal that lacks steps its run has taken; warn of a last write that was cut short.

    A run that was killed leaves a write unfinished, and nothing else is lost.  A last record with a wrong checksum,
    or fewer records than the finished run's summary counts, means that the last weights cannot be rebuilt.

    Args:
        contents: the contents of the whole file.
        place: the journal, or the run's folder, whose ``summary.json`` is read.
        way: the option for taking the steps before the lost ones; ``{steps}`` stands for their number.
        force: only warn.
    """
    steps = len(contents.records)
    promised = finished_steps(contents, place)
    if contents.damaged or promised > steps:
        finished = f"the run finished with {promised:,} steps, and " if promised > steps else ""
        lacks = f"ends with {contents.note}" if contents.torn else f"holds {steps:,}"
        message = f"{place}: {finished}the journal {lacks}"
        if not force:
            folder = format.locate(place).parent
            repair = f"; to take the lost steps again, remove summary.* and run zeroblock resume {folder}"
            raise ZeroBlockError(
                f"{message}: the weights of its last step cannot be rebuilt; {way.format(steps=steps)} takes the "
                f"{steps:,} steps before it{repair if promised else ''}"
            )
        warnings.warn(f"{message}: these are the weights after {steps:,} steps", ZeroBlockWarning, stacklevel=3)
    elif contents.torn:
        warnings.warn(f"{place} ends with {contents.note}, which are left out", ZeroBlockWarning, stacklevel=3)


def is_own(contents: Contents, place: str | Path) -> bool:
    """Whether a journal is the one that a run writes in its folder, and not another file in it."""
    return format.locate(place).name == "journal.zbj" and contents.header.steps is None


def finished_steps(contents: Contents, place: str | Path) -> int:
    """The number of steps in the summary of a finished run; 0 if there is none."""
    if not is_own(contents, place):
        return 0
    try:
        steps = json.loads(format.locate(place).with_name("summary.json").read_bytes())["steps"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0
    return steps if isinstance(steps, int) and 0 <= steps < MAX_STEPS else 0


def public(header: Header) -> Header:
    """A header without the folders of this machine, which may contain a person's name."""
    return header.replace(
        model=public_name(header.model),
        task=_without_folders(header.task),
        data=_without_folders(header.data),
        extra=_without_folders(header.extra),
    )


def public_name(model: str) -> str:
    """The hub id of a model if it has one, otherwise the last part of its path.

    >>> public_name("/home/ann/models/tuned/"), public_name("facebook/opt-125m")
    ('tuned', 'facebook/opt-125m')
    >>> public_name("/home/ann/.cache/huggingface/hub/models--facebook--opt-125m/snapshots/27dcfa74d334/")
    'facebook/opt-125m'
    """
    cached = re.search(r"(?:^|[/\\])models--([^/\\]+)", model)
    if cached:
        return cached[1].replace("--", "/", 1)
    local = model.startswith(("/", ".", "~")) or "\\" in model or model.count("/") > 1 or Path(model).exists()
    return _last_part(model) if model and local else model


def _without_folders(value: Any) -> Any:
    """Plain data whose absolute paths, in texts and in keys, are cut to their last part.

    >>> _without_folders({"/home/ann/a.txt": "from file:///home/ann/b.txt, 'C:\\\\ann\\\\c' and ~/d/e; and/or"})
    {'a.txt': "from b.txt, 'c' and e; and/or"}
    >>> _without_folders("/home/ann b/a file.txt")
    'a file.txt'
    """
    match value:
        case str() if ABSOLUTE.match(value):
            return ABSOLUTE_WITHIN.sub(_cut, _last_part(value))
        case str():
            return ABSOLUTE_WITHIN.sub(_cut, value)
        case dict():
            return {_without_folders(name): _without_folders(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_without_folders(inner) for inner in value]
    return value


def _cut(path: re.Match[str]) -> str:
    return _last_part(path[0])


def _last_part(path: str) -> str:
    parts = [part for part in re.split(r"[/\\]", path) if part]
    if parts and parts[-1] in (".", ".."):
        return Path(path).expanduser().resolve().name
    return parts[-1] if parts else ""
