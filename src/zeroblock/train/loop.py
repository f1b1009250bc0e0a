"""Entry points: start, resume or finish a run, or measure a model without training."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ZeroBlockError, ZeroBlockWarning
from ..evaluate.evaluator import Evaluation
from ..journal import Header, Journal
from ..journal.format import dump, parse
from ..report.about import block_sizes, write_about
from ..report.track import LOCAL
from ..report.track import check as check_tracker
from ..report.view import Quiet, View
from .compose import eps_advice, fold_advice
from .config import BACKPROPAGATION, EXECUTION, Config
from .folder import Folder
from .follower import Log, Unwritten
from .joint import OWN, load, measured_alike, opened, shared
from .learner import ZerothOrder
from .offloaded import decided
from .peers import Peers
from .price import as_begun, priced
from .session import Result, Session, out_of_memory
from .workload import Workload, prepare, resolve


def run(config: Config, out: str | Path, view: View | None = None) -> Result:
    """Make a run in a new folder.

    In a process group, all ranks call this and take the steps together; one of them writes.

    Args:
        config: the run's settings.
        out: the folder; an error if it already holds a run.
        view: shows the run; by default nothing is shown.
    """
    config = resolve(config)
    with opened(out, Peers.here()) as (folder, peers):
        peers.first(folder.refuse)
        with measured_alike(config):
            return _begin(config, folder, view or Quiet(), peers)


def resume(
    out: str | Path,
    view: View | None = None,
    *,
    force: bool = False,
    trust_remote_code: bool = False,
    **changes: Any,
) -> Result:
    """Continue a run where it was stopped, bit for bit, on as many ranks as there are now.

    Args:
        out: its folder; only the rank that writes needs to have it.
        view: shows the run; by default nothing is shown.
        force: accept other base weights and another version of the package.
        trust_remote_code: run the code that comes with the model, whatever the folder's configuration says.
        changes: settings of :data:`~zeroblock.train.config.EXECUTION` to change from here on.
    """
    with opened(out, Peers.here()) as (folder, peers):
        config = peers.first(lambda: _recorded(folder, trust_remote_code, changes))
        config = config.replace(trust_remote_code=trust_remote_code)  # each rank decides for itself
        config = peers.together(lambda: decided(config))
        with measured_alike(config):
            return _continue(config, folder, view or Quiet(), peers, force)


def _recorded(folder: Folder, trust_remote_code: bool, changes: Mapping[str, Any]) -> Config:
    """Read the configuration of a run that can be continued, and lock its folder."""
    config = folder.config(trust_remote_code=trust_remote_code).replace(**changes)
    if folder.summary() is not None and folder.reported:
        raise ZeroBlockError(f"the run in {folder.path} has finished: see {folder.path / 'summary.md'}")
    if "track" not in changes and config.track not in (None, *LOCAL):
        warnings.warn(
            f"{folder.path / 'config.toml'}: track = {config.track!r} is ignored on resume, because it may upload "
            f"the run; to use it, add --track {config.track} to this command",
            ZeroBlockWarning,
            stacklevel=4,
        )
        config = config.replace(track=None)
    folder.lock()
    if config.method == BACKPROPAGATION and folder.summary() is None:
        raise ZeroBlockError(
            f"ft keeps no journal, so the run in {folder.path} cannot be continued: start it again with "
            f"zeroblock train --config {folder.path / 'config.toml'} and another --out{_kept(folder)}"
        )
    return config


def make(config: Config, out: str | Path, view: View | None = None) -> Result:
    """Finish a run: start it, continue it, or return its result if it has finished.

    Args:
        config: the run's settings; an error if the folder holds another run.
        out: its folder.
        view: shows the run; by default nothing is shown.
    """
    view, config = view or Quiet(), resolve(config)
    with opened(out, Peers.here()) as (folder, peers), measured_alike(config):
        there = peers.first(lambda: _same(config, folder) if folder.begun else None)
        if there is None:
            return _begin(config, folder, view, peers)
        there = there.replace(**{name: getattr(config, name) for name in (*EXECUTION, *OWN)})
        summary = peers.first(folder.summary)
        if summary is not None:
            return Result(folder.path, summary["steps"], summary)
        peers.first(folder.lock)
        if config.method == BACKPROPAGATION:
            return _begin(config, folder, view, peers, again=True)
        return _continue(there, folder, view, peers)


def _same(config: Config, folder: Folder) -> Config:
    """The configuration of the run in a folder; an error if that is another run."""
    changes = {name: getattr(config, name) for name in EXECUTION}
    there = folder.config(trust_remote_code=config.trust_remote_code).replace(**changes)
    config = as_begun(config, there)
    if config.shares is None:  # as many as the run began with
        config = config.replace(shares=there.shares)
    if there != config:
        name = next(n for n, v in dataclasses.asdict(config).items() if getattr(there, n) != v)
        raise ZeroBlockError(
            f"{folder.path} holds a run with {name} {getattr(there, name)!r}, not {getattr(config, name)!r}: "
            "give another folder"
        )
    return there


def measure(config: Config, split: str, view: View | None = None) -> Evaluation:
    """Evaluate a model as it is: zero-shot, or with demonstrations.

    Args:
        config: settings with the method ``zero-shot`` or ``icl``.
        split: ``dev`` or ``test``.
        view: shows the evaluation; by default nothing is shown.
    """
    view = view or Quiet()
    workload = prepare(resolve(config), splits=(split,), tell=view.note)
    for note in workload.notes:
        view.note(note)
    exam = workload.exams[split]
    with out_of_memory():
        return workload.evaluator(exam, check=lambda done: view.evaluating(0, split, done, len(exam.examples)))


def _begin(config: Config, folder: Folder, view: View, peers: Peers, again: bool = False) -> Result:
    """Start a run; nothing is written before the model and the data have been loaded."""
    peers.first(lambda: check_tracker(config.track))
    config = shared(config, peers, view.note, begins=True)
    workload = priced(load(config, peers, view.note, out=folder.path), view.note, peers)
    config = workload.config
    peers.first(lambda: folder.create(config, again=again))
    session = Session(workload, folder, view, peers=peers)
    optimizer = session.learner.optimizer if isinstance(session.learner, ZerothOrder) else None
    sizes = block_sizes(optimizer) if optimizer else ()

    def describe() -> None:
        with folder.writing():
            write_about(folder.path, workload.model, optimizer, sizes)

    peers.first(describe)
    if optimizer is None:
        return session.go()
    for advice in (fold_advice(config, optimizer), "" if config.adapter else eps_advice(optimizer)):
        if advice:
            view.note(advice)
    header = Header.of(
        optimizer, model=config.model, task=Path(config.task).name, data=workload.fingerprint,
        method=config.method, random_weights=config.random_weights, exams=workload.exam_digest,
        **session.origin,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        session.journal = Unwritten()
        if peers.leads:
            session.journal = stack.enter_context(Journal.create(folder.journal, header, fsync=config.fsync))
        return session.go()


def _continue(config: Config, folder: Folder, view: View, peers: Peers, force: bool = False) -> Result:
    """Continue a run whose folder is locked."""
    summary = peers.first(folder.summary)
    if summary is not None:  # stopped before its report was written
        peers.first(folder.report)
        return Result(folder.path, summary["steps"], summary)
    if not peers.first(folder.journal.exists):  # stopped before its first step
        return _begin(config, folder, view, peers, again=True)
    with contextlib.ExitStack() as stack:
        journal: Log = Unwritten()

        def take_up() -> tuple[str, bytes]:
            nonlocal journal
            journal = mine = stack.enter_context(Journal.open(folder.journal, fsync=config.fsync))
            if len(mine.records) > config.steps:
                raise ZeroBlockError(
                    f"{folder.journal} holds {len(mine.records)} steps, but config.toml asks for {config.steps}: bring "
                    "back the config.toml and the journal that belong together"
                )
            return mine.note, dump(mine.header, mine.records)

        note, data = peers.first(take_up)
        contents = parse(data, str(folder.journal))
        if note:
            view.note(note)
        config = shared(config, peers, view.note, begins=False)
        if config.fold is None:
            config = _with_fold(config, contents.header, folder)
        check = functools.partial(_check_data, contents.header, folder)
        workload = load(config, peers, view.note, check, folder.path, folder.path)
        session = Session(workload, folder, view, journal, peers)
        session.restore(contents.header, contents.records, force)
        for measurement in folder.measurements:
            if measurement.step == 0:
                view.baseline(measurement)
        return session.go()


def _check_data(header: Header, folder: Folder, workload: Workload) -> None:
    """Refuse data that are not the run's."""
    if header.data != workload.fingerprint:
        raise ZeroBlockError(
            f"the training data differ from those that the run in {folder.path} began with (fingerprint "
            f"{header.data}, now {workload.fingerprint}): restore them, or start a new run"
        )
    if header.extra.get("exams", workload.exam_digest) != workload.exam_digest:
        raise ZeroBlockError(
            f"the rows that the run in {folder.path} is evaluated on differ from those it began with: restore them, "
            "or start a new run"
        )


def _kept(folder: Folder) -> str:
    """Say where the weights of a stopped ``ft`` are, if it kept any."""
    return f"; the best weights so far are in {folder.model}" if folder.model.is_dir() else ""


def _with_fold(config: Config, header: Header, folder: Folder) -> Config:
    """Set the fold that the run chose when it began, from its journal."""
    try:
        return config.replace(fold=header.method.get("fold", 1))
    except ZeroBlockError as error:
        raise ZeroBlockError(
            f"{folder.path / 'config.toml'} is not the one the run began with ({error}): restore that one"
        ) from error
