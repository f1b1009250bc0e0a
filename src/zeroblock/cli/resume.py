"""``zeroblock resume``: go on with a run that was stopped or killed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..train.config import EXECUTION
from .replay import Force
from .train import Json, Quiet, report, settings, view


@settings(*EXECUTION)
def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The run's folder.")],
    force: Force = False,
    quiet: Quiet = False,
    json: Json = False,
    **given: Any,
) -> None:
    """Continue a run where it stopped, bit for bit, whatever stopped it."""
    from ..train import resume as go_on

    changes = {name: value for name, value in given.items() if value is not None}
    report(go_on(folder, view(quiet, json), force=force, **changes), json)
