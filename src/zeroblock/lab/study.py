"""A study measures in jobs, draws its figures from the resulting tables, and explains each figure in a sentence."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from matplotlib.figure import Figure
from pandas import DataFrame

from . import figure
from .runner import Runner

Frames = dict[str, DataFrame]
"""Tables by the name of their CSV."""


class Study(Protocol):
    """One subject of the lab: a frozen dataclass whose fields are its settings."""

    @property
    def name(self) -> str:
        """The name of the subcommand."""
        ...

    @property
    def jobs(self) -> int:
        """The number of jobs that ``measure`` runs, for the progress bar."""
        ...

    @property
    def captions(self) -> dict[str, str]:
        """A sentence for each figure, by name."""
        ...

    def measure(self, run: Runner) -> Frames: ...

    def draw(self, frames: Frames) -> dict[str, Figure]: ...


def carry_out(study: Study, folder: Path, run: Runner) -> list[Path]:
    """Measure, write the tables, draw the figures and write them; return the paths written."""
    frames = study.measure(run)
    written = [figure.table(frame, folder, name) for name, frame in frames.items()]
    with figure.style():
        for name, drawn in study.draw(frames).items():
            written += figure.save(drawn, folder, name)
    return written


def readme(studies: Iterable[Study], folder: Path) -> Path:
    """Write ``README.md``: each figure with its caption and the command that draws it."""
    lines = ["# The theory lab", ""]
    for study in studies:
        lines += [f"## `zeroblock lab {study.name}`", ""]
        for name, sentence in study.captions.items():
            lines += [f"![{name}]({name}.png)", "", f"**[{name}.pdf]({name}.pdf)**: {sentence}", ""]
        tables = sorted(p.name for p in folder.glob("*.csv") if p.stem in _tables(study))
        lines += ["Numbers: " + ", ".join(f"[{t}]({t})" for t in tables) + ".", ""]
    path = folder / "README.md"
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return path


def _tables(study: Study) -> set[str]:
    return set(getattr(study, "tables", ())) | set(study.captions)
