"""``zeroblock export``: write a run as one file to share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ZeroBlockError
from .replay import Step, choose_step, is_kept


def export(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a journal.")],
    out: Annotated[Path, typer.Option(help="The file to write: NAME.zbj.")],
    step: Step = None,
) -> None:
    """Write one shareable file: the run's journal and a card.

    For example: `zeroblock export runs/sst2 --out sst2.zbj`; others use it with `zeroblock apply sst2.zbj`
    """
    from ..journal import export as write
    from ..train.folder import Folder

    if is_kept(run):
        raise ZeroBlockError(f"ft keeps no journal to export: its weights are in {Folder(run).model}")
    path = write(run, out, step=choose_step(run, step))
    typer.echo(f"{path}: {path.stat().st_size:,} bytes; zeroblock inspect {path} shows it")
