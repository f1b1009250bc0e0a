"""``zeroblock export``: write a run as one file to share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a journal.")],
    out: Annotated[Path, typer.Option(help="The file to write: NAME.zbj.")],
    step: Annotated[int | None, typer.Option(min=1, help="Only this many steps; all by default.")] = None,
) -> None:
    """Write one shareable file: the run's journal and a card."""
    from ..journal import export as write

    path = write(run, out, step=step)
    typer.echo(f"{path}: {path.stat().st_size:,} bytes; zeroblock inspect {path} shows it")
