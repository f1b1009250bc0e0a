"""``zeroblock eval``: a model as it is on a task, zero-shot or with demonstrations."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated, Any

import typer

from ..errors import unknown
from ..train.config import Config
from .train import Json, Quiet, settings, view

SETTINGS = (
    "model", "random_weights", "trust_remote_code", "dtype", "device", "task", "data", "data_seed", "max_length",
    "shots", "calibrate", "max_tokens",
)  # fmt: skip


@settings(*SETTINGS)
def evaluate(
    limit: Annotated[int | None, typer.Option(min=1, help="Evaluate on this many examples at most.")] = None,
    split: Annotated[str, typer.Option(help="dev or test, in the protocol's order.")] = "test",
    quiet: Quiet = False,
    json: Json = False,
    **given: Any,
) -> None:
    """Evaluate a model on a task, without training."""
    from ..train import measure

    if split not in ("dev", "test"):
        raise unknown("split", split, ("dev", "test"))
    flags = {name: value for name, value in given.items() if value is not None}
    config = Config.of({"method": "icl" if flags.get("shots") else "zero-shot", "eval_limit": limit, **flags})
    shown = view(quiet or json, json)
    try:
        found = measure(config, split, shown)
    finally:
        shown.close()
    if json:
        line = {
            "task": config.task, "metric": found.metric, "value": found.value, "n": found.n,
            "seconds": round(found.seconds, 3),
        }  # fmt: skip
        typer.echo(jsonlib.dumps(line))
        return
    exact = "" if found.exact_match is None else f", exact match {found.exact_match:.1%}"
    typer.echo(
        f"{config.task} {split}: {found.metric} {found.value:.1%}{exact}, loss {found.loss:.4f} "
        f"(n {found.n}, {found.seconds:.1f} s)"
    )
