"""Runs from the outside: start one, resume one, finish one, or measure a model without training."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

from ..errors import ZeroBlockError, ZeroBlockWarning
from ..evaluate.evaluator import Evaluation
from ..journal import Header, Journal
from ..report.about import write_about
from ..report.track import LOCAL
from ..report.track import check as check_tracker
from ..report.view import Quiet, View
from .compose import fold_advice
from .config import BACKPROPAGATION, EXECUTION, Config
from .folder import Folder
from .learner import ZerothOrder
from .price import as_begun, priced
from .session import Result, Session, out_of_memory
from .workload import prepare, resolve


def run(config: Config, out: str | Path, view: View | None = None) -> Result:
    """Make a run in a folder of its own.

    Args:
        config: what to do.
        out: the folder; one that holds a run is refused.
        view: shows the run; by default nothing is shown.
    """
    with Folder(out) as folder:
        folder.refuse()
        return _begin(resolve(config), folder, view or Quiet())


def resume(
    out: str | Path,
    view: View | None = None,
    *,
    force: bool = False,
    trust_remote_code: bool = False,
    **changes: Any,
) -> Result:
    """Continue a run where it was stopped, bit for bit.

    Args:
        out: its folder.
        view: shows the run; by default nothing is shown.
        force: accept other base weights and another version of the package.
        trust_remote_code: run the code that comes with the model, whatever the folder says of it.
        changes: settings of :data:`~zeroblock.train.config.EXECUTION` to change from here on.
    """
    with Folder(out) as folder:
        config = folder.config(trust_remote_code=trust_remote_code).replace(**changes)
        if folder.summary() is not None and folder.reported:
            raise ZeroBlockError(f"the run in {folder.path} has finished: see {folder.path / 'summary.md'}")
        if "track" not in changes and config.track not in (None, *LOCAL):
            warnings.warn(
                f"{folder.path / 'config.toml'}: track = {config.track!r} is ignored on resume, because it may upload "
                f"the run; to use it, add --track {config.track} to this command",
                ZeroBlockWarning,
                stacklevel=2,
            )
            config = config.replace(track=None)
        folder.lock()
        if config.method == BACKPROPAGATION and folder.summary() is None:
            raise ZeroBlockError(
                f"ft keeps no journal, so the run in {folder.path} cannot be continued: start it again with "
                f"zeroblock train --config {folder.path / 'config.toml'} and another --out{_kept(folder)}"
            )
        return _continue(config, folder, view or Quiet(), force)


def make(config: Config, out: str | Path, view: View | None = None) -> Result:
    """Finish a run, whatever there is of it: nothing, a part, or all.

    Args:
        config: the run's; a folder that holds another run is refused.
        out: its folder.
        view: shows the run; by default nothing is shown.
    """
    view, config = view or Quiet(), resolve(config)
    with Folder(out) as folder:
        if not folder.begun:
            return _begin(config, folder, view)
        changes = {name: getattr(config, name) for name in EXECUTION}
        there = folder.config(trust_remote_code=config.trust_remote_code).replace(**changes)
        config = as_begun(config, there)
        if there != config:
            name = next(n for n, v in dataclasses.asdict(config).items() if getattr(there, n) != v)
            raise ZeroBlockError(
                f"{folder.path} holds a run with {name} {getattr(there, name)!r}, not {getattr(config, name)!r}: "
                "give another folder"
            )
        summary = folder.summary()
        if summary is not None:
            return Result(folder.path, summary["steps"], summary)
        folder.lock()
        if config.method == BACKPROPAGATION:
            return _begin(config, folder, view, again=True)
        return _continue(there, folder, view)


def measure(config: Config, split: str, view: View | None = None) -> Evaluation:
    """Evaluate a model as it is: zero-shot, or with demonstrations.

    Args:
        config: of the method ``zero-shot`` or ``icl``.
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


def _begin(config: Config, folder: Folder, view: View, again: bool = False) -> Result:
    """Start a run; nothing is written before the model and the data have been loaded."""
    check_tracker(config.track)
    workload = priced(prepare(config, tell=view.note), view.note)
    config = workload.config
    folder.create(config, again=again)
    session = Session(workload, folder, view)
    optimizer = session.learner.optimizer if isinstance(session.learner, ZerothOrder) else None
    with folder.writing():
        write_about(folder.path, workload.model, optimizer)
    if not isinstance(session.learner, ZerothOrder):
        return session.go()
    advice = fold_advice(config, session.learner.optimizer)
    if advice:
        view.note(advice)
    header = Header.of(
        session.learner.optimizer, model=config.model, task=Path(config.task).name, data=workload.fingerprint,
        method=config.method, random_weights=config.random_weights, exams=workload.exam_digest,
        **session.origin,
    )  # fmt: skip
    with Journal.create(folder.journal, header, fsync=config.fsync) as journal:
        session.journal = journal
        return session.go()


def _continue(config: Config, folder: Folder, view: View, force: bool = False) -> Result:
    """Go on with a run whose folder is locked."""
    summary = folder.summary()
    if summary is not None:  # stopped before its report was written
        folder.report()
        return Result(folder.path, summary["steps"], summary)
    if not folder.journal.exists():  # stopped before its first step
        return _begin(config, folder, view, again=True)
    with Journal.open(folder.journal, fsync=config.fsync) as journal:
        if journal.note:
            view.note(journal.note)
        if len(journal.records) > config.steps:
            raise ZeroBlockError(
                f"{folder.journal} holds {len(journal.records)} steps, but config.toml asks for {config.steps}: bring "
                "back the config.toml and the journal that belong together"
            )
        if config.fold is None:
            config = _with_fold(config, journal.header, folder)
        workload = prepare(config, tell=view.note)
        if journal.header.data != workload.fingerprint:
            raise ZeroBlockError(
                f"the training data are not those that the run in {folder.path} began with (fingerprint "
                f"{journal.header.data}, now {workload.fingerprint}): bring them back, or begin a new run"
            )
        if journal.header.extra.get("exams", workload.exam_digest) != workload.exam_digest:
            raise ZeroBlockError(
                f"the rows that the run in {folder.path} is evaluated on are not those it began with: bring them back, "
                "or begin a new run"
            )
        session = Session(workload, folder, view, journal)
        session.restore(journal.header, journal.records, force)
        for measurement in folder.measurements:
            if measurement.step == 0:
                view.baseline(measurement)
        return session.go()


def _kept(folder: Folder) -> str:
    """Say where the weights of a stopped ``ft`` are, if it kept any."""
    return f"; the best weights so far are in {folder.model}" if folder.model.is_dir() else ""


def _with_fold(config: Config, header: Header, folder: Folder) -> Config:
    """Take the fold that the run chose when it began, which its journal tells."""
    try:
        return config.replace(fold=header.method.get("fold", 1))
    except ZeroBlockError as error:
        raise ZeroBlockError(
            f"{folder.path / 'config.toml'} is not the one the run began with ({error}): bring that one back"
        ) from error
