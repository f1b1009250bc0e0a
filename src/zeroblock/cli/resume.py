"""``zeroblock resume``: continue a run that was stopped or killed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..train.config import EXECUTION, TIMEOUT_SECONDS
from .replay import Force
from .train import Json, Quiet, joined, launched, report, settings, view


@settings("trust_remote_code", *EXECUTION)
def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The run's folder.")],
    force: Force = False,
    quiet: Quiet = False,
    json: Json = False,
    **given: Any,
) -> None:
    """Continue a run where it stopped, bit for bit, whatever stopped it.

    The other settings are those the run began with: they are in config.toml of its folder.
    """
    from ..train import resume as resume_run

    changes = {name: value for name, value in given.items() if value is not None}
    launch = launched(changes)
    with joined(launch, changes.get("device", "auto"), changes.get("timeout", TIMEOUT_SECONDS)):
        result = resume_run(folder, view(quiet, json, launch), force=force, **changes)
    report(result, json, launch)
