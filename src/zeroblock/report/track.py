"""Trackers, which show the numbers of a run while it runs."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from .. import atomic
from ..errors import ZeroBlockError, unknown

PROJECT = "zeroblock"
"""The project that wandb and trackio file runs under."""
LOCAL = ("tensorboard", "none")
"""Trackers that write to the run folder only. The others may upload, so a file alone cannot choose them on resume."""


class Tracker(Protocol):
    """Receives the numbers of a run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show some numbers of a step, by name; a slash groups them (``dev/accuracy``)."""

    def close(self) -> None:
        """Write what is pending and stop."""


class Silent:
    """Does nothing."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoard:
    """Event files in ``tensorboard/`` of the run folder."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        _require("tensorboard")  # the error of torch does not say what to install
        from torch.utils.tensorboard import SummaryWriter

        atomic.make_folder(folder / "tensorboard")
        self.writer = SummaryWriter(str(folder / "tensorboard"))
        rows = "\n".join(f"| {name} | {value} |" for name, value in config.items())
        self.writer.add_text("config", f"| field | value |\n|---|---|\n{rows}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, named after the folder; ``zeroblock resume DIR --track wandb`` continues it."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        wandb = _require("wandb")
        atomic.make_folder(folder / "wandb")  # wandb keeps its files there
        # one id per folder, so that resuming appends to the same curves
        name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        self.run = wandb.init(
            project=PROJECT, name=folder.name, id=name, resume="allow", dir=str(folder), config=dict(config)
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """A run of trackio, which stays on this machine by default."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        trackio = _require("trackio")
        self.run = trackio.init(project=PROJECT, name=folder.name, resume="allow", config=dict(config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
    "none": lambda folder, config: Silent(),
}


def tracker(name: str | None, folder: Path, config: Mapping[str, Any]) -> Tracker:
    """Open a tracker by name.

    Args:
        name: ``tensorboard``, ``wandb`` or ``trackio``; ``none`` or None for one that does nothing.
        folder: the run folder.
        config: the settings of the run, shown with the numbers.
    """
    name = name or "none"
    if name not in TRACKERS:
        raise unknown("tracker", name, TRACKERS)
    return TRACKERS[name](folder, config)


def check(name: str | None) -> None:
    """Refuse a tracker whose package is not installed, before the run begins."""
    if name in TRACKERS and name != "none":
        _require(name)


def _require(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ZeroBlockError(f"--track {module} needs a package that is not installed: pip install {module}") from error
