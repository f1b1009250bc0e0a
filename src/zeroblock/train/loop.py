"""The loop: steps and evaluations from the first to the last, stopped and resumed at any point."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ..errors import ZeroBlockError
from ..evaluate.evaluator import Evaluation
from ..journal import Header, Journal
from ..report.track import check as check_tracker
from ..report.view import Quiet, View
from .compose import folds_if
from .config import BACKPROPAGATION, EXECUTION, Config
from .folder import Folder
from .learner import ZerothOrder
from .session import Result, Session, out_of_memory
from .workload import prepare, resolve


def run(config: Config, out: str | Path, view: View | None = None) -> Result:
    """Make a run in a folder of its own.

    Args:
        config: what to do.
        out: the folder; one that holds a run is refused.
        view: shows it; nothing does unless given.
    """
    folder = Folder(out)
    folder.refuse()
    return _begin(resolve(config), folder, view or Quiet())


def resume(out: str | Path, view: View | None = None, *, force: bool = False, **changes: Any) -> Result:
    """Continue a run where it was stopped, bit for bit.

    Args:
        out: its folder.
        view: shows it; nothing does unless given.
        force: accept other base weights and another version of the package.
        changes: settings of :data:`~zeroblock.train.config.EXECUTION` that shall differ from here on.
    """
    folder, view = Folder(out), view or Quiet()
    config = folder.config.replace(**changes)
    summary = folder.summary()
    if summary is not None and folder.reported:
        raise ZeroBlockError(f"the run in {folder.path} has finished: see {folder.path / 'summary.md'}")
    if summary is not None:  # stopped in its last moments
        folder.report()
        return Result(folder.path, summary["steps"], summary)
    if config.method == BACKPROPAGATION:
        raise ZeroBlockError(
            f"ft keeps no journal, so the run in {folder.path} cannot be continued: start it again with "
            f"zeroblock train --config {folder.path / 'config.toml'} and another --out"
        )
    if not folder.journal.exists():  # stopped before its first step
        return _begin(config, folder, view, again=True)
    with Journal.open(folder.journal, fsync=config.fsync) as journal:
        if journal.note:
            view.note(journal.note)
        if config.fold is None:
            config = _with_fold(config, journal.header, folder)
        setting = prepare(config, tell=view.note)
        if journal.header.data != setting.fingerprint:
            raise ZeroBlockError(
                f"the training data are not those that the run in {folder.path} began with (fingerprint "
                f"{journal.header.data}, now {setting.fingerprint}): bring them back, or begin a new run"
            )
        if journal.header.extra.get("exams", setting.examined) != setting.examined:
            raise ZeroBlockError(
                f"the rows that the run in {folder.path} is evaluated on are not those it began with: bring them back, "
                "or begin a new run"
            )
        session = Session(setting, folder, view, journal)
        session.restore(journal.header, journal.records, force)
        return session.go()


def _with_fold(config: Config, header: Header, folder: Folder) -> Config:
    """What a run chose when it began is in its journal."""
    try:
        return config.replace(fold=header.method.get("fold", 1))
    except ZeroBlockError as error:
        raise ZeroBlockError(
            f"{folder.path / 'config.toml'} is not what the run began with ({error}): bring that back"
        ) from error


def make(config: Config, out: str | Path, view: View | None = None) -> Result:
    """Finish a run, whatever there is of it: nothing, a part, or all.

    Args:
        config: what it is; a folder that holds another run is refused.
        out: its folder.
        view: shows it; nothing does unless given.
    """
    folder, view, config = Folder(out), view or Quiet(), resolve(config)
    if not folder.begun:
        return _begin(config, folder, view)
    changes = {name: getattr(config, name) for name in EXECUTION}
    there = folder.config.replace(**changes)
    if there != config:
        differs = next(n for n, v in dataclasses.asdict(config).items() if getattr(there, n) != v)
        raise ZeroBlockError(
            f"{folder.path} holds a run with {differs} {getattr(there, differs)!r}, not {getattr(config, differs)!r}: "
            "give another folder"
        )
    summary = folder.summary()
    if summary is not None:
        return Result(folder.path, summary["steps"], summary)
    if config.method == BACKPROPAGATION or not folder.journal.exists():
        return _begin(config, folder, view, again=True)
    return resume(folder.path, view, **changes)


def measure(config: Config, split: str, view: View | None = None) -> Evaluation:
    """Evaluate a model as it is: zero-shot, or with demonstrations.

    Args:
        config: of the method ``zero-shot`` or ``icl``.
        split: ``dev`` or ``test``.
        view: shows it; nothing does unless given.
    """
    view = view or Quiet()
    setting = prepare(resolve(config), splits=(split,), tell=view.note)
    for note in setting.notes:
        view.note(note)
    exam = setting.exams[split]
    with out_of_memory():
        return setting.evaluator(exam, check=lambda done: view.evaluating(0, split, done, len(exam.examples)))


def _begin(config: Config, folder: Folder, view: View, again: bool = False) -> Result:
    check_tracker(config.track)
    setting = prepare(config, tell=view.note)
    folder.create(config, again=again)
    session = Session(setting, folder, view)
    if not isinstance(session.learner, ZerothOrder):
        return session.go()
    seldom = folds_if(config, session.learner.optimizer)
    if seldom:
        view.note(seldom)
    header = Header.of(
        session.learner.optimizer, model=config.model, task=Path(config.task).name, data=setting.fingerprint,
        method=config.method, random_weights=config.random_weights, exams=setting.examined,
    )  # fmt: skip
    with Journal.create(folder.journal, header, fsync=config.fsync) as journal:
        session.journal = journal
        return session.go()
