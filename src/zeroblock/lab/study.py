"""A study: jobs that measure, figures drawn from the numbers alone, a sentence about each figure."""

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
    """One subject of the lab; a frozen dataclass whose fields are its settings."""

    @property
    def name(self) -> str:
        """Of the subcommand."""
        ...

    @property
    def jobs(self) -> int:
        """How many jobs ``measure`` runs, for the progress bar."""
        ...

    @property
    def captions(self) -> dict[str, str]:
        """A sentence for each figure, by its name."""
        ...

    def measure(self, run: Runner) -> Frames: ...

    def draw(self, frames: Frames) -> dict[str, Figure]: ...


def carry_out(study: Study, folder: Path, run: Runner) -> list[Path]:
    """Measure, write the CSVs, draw from them, write the figures; returns what was written."""
    frames = study.measure(run)
    written = [figure.table(frame, folder, name) for name, frame in frames.items()]
    with figure.style():
        for name, drawn in study.draw(frames).items():
            written += figure.save(drawn, folder, name)
    return written


def readme(studies: Iterable[Study], folder: Path) -> Path:
    """``README.md``: each figure, what it shows in a sentence, and the command that draws it again."""
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
