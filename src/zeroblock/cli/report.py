"""``zeroblock report``: write the page that shows a run, a sweep or a race."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ZeroBlockError


def report(
    place: Annotated[
        Path, typer.Argument(help="The folder of a run, of a sweep or of a race.", metavar="RUN|SWEEP|RACE")
    ],
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Write report.html again: result, curves, blocks, environment and commands on one self-contained page.

    Runs, sweeps and races write it by themselves: at every evaluation, after every run, at the end.
    """
    if (place / "config.toml").is_file():
        from ..report.html_run import write_report
    elif (place / "table.csv").is_file():
        from ..report.html_sweep import write_report
    elif (place / "race.json").is_file():
        from ..race.page import write_report
    else:
        inside = sorted(path.parent.name for path in place.glob("*/race.json"))
        hint = f"; it holds one race per task: name one, as in {place / inside[0]}" if inside else ""
        raise ZeroBlockError(
            f"{place} holds neither a run (config.toml) nor a sweep (table.csv) nor a race (race.json){hint}"
        )
    path = write_report(place)
    typer.echo(str(path))
    if open_:
        import webbrowser

        if not webbrowser.open(path.resolve().as_uri()):
            raise ZeroBlockError(f"no browser could be started: open {path} yourself")
