"""``zeroblock schedule``: the order in which blocks are visited."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

import typer


def schedule(
    order: Annotated[
        str, typer.Option(help="ascending, descending, flip-flop, shuffled, uniform or adaptive.")
    ] = "shuffled",
    blocks: Annotated[int, typer.Option(min=1, help="Number of blocks N.")] = 5,
    turns: Annotated[int, typer.Option(min=0, help="Number of turns to print.")] = 20,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of the random orders.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Print the sequence of block indices; block 0 is nearest to the input.

    The adaptive order depends on the coefficients that a run measures. Here it has seen none.
    """
    from ..schedule import by_name

    picked = by_name(order)
    sequence = [picked.pick(turn, blocks, seed, [0.0] * blocks) for turn in range(turns)]
    typer.echo(jsonlib.dumps(sequence) if json else " ".join(map(str, sequence)))
