"""``zeroblock schedule``: the order in which blocks are visited."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

import typer

from ..errors import ZeroBlockError, warn_renamed


def schedule(
    schedule: Annotated[
        str | None,
        typer.Option(
            help="random (or shuffled), flip-flop, ascending, descending, uniform, adaptive, proportional, economical, "
            "subset or bandit. [random]"
        ),
    ] = None,
    blocks: Annotated[int, typer.Option(min=1, help="Number of blocks N.")] = 5,
    turns: Annotated[int, typer.Option(min=0, help="Number of turns to print.")] = 20,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of the random orders.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
    order: Annotated[str | None, typer.Option("--order", hidden=True)] = None,
) -> None:
    """Print the sequence of block indices; block 0 is nearest to the input.

    Schedules that learn depend on the coefficients that a run measures. Here there are none. economical takes
    costs, one per block, after a colon: economical:2,1,0.5.
    """
    from ..schedule import by_name

    if order is not None:  # its name until 0.1
        if schedule is not None:
            raise ZeroBlockError("--order is the old name of --schedule, which is given too: leave --order out")
        warn_renamed("--order", "--schedule")
    picked = by_name(schedule or order or "random")
    sequence = [picked.pick(turn, blocks, seed, [0.0] * blocks) for turn in range(turns)]
    typer.echo(jsonlib.dumps(sequence) if json else " ".join(map(str, sequence)))
