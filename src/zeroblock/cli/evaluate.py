"""``zeroblock eval``: measure a model on a task, zero-shot or with demonstrations."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated, Any

import typer

from ..errors import unknown
from ..train.config import Config
from .train import Json, Quiet, settings, view

SETTINGS = (
    "model", "random_weights", "trust_remote_code", "dtype", "weights", "device", "task", "data", "data_seed", "turns",
    "ending", "metric", "max_length", "shots", "calibrate", "max_tokens", "offload", "memory",
)  # fmt: skip


@settings(*SETTINGS)
def evaluate(
    limit: Annotated[int | None, typer.Option(min=1, help="Evaluate on at most this many examples.")] = None,
    split: Annotated[str, typer.Option(help="The split to evaluate on: dev or test.", metavar="dev|test")] = "test",
    quiet: Quiet = False,
    json: Json = False,
    **given: Any,
) -> None:
    """Evaluate a model on a task, without training.

    For example: `zeroblock eval --model smollm2 --task reviews --limit 200`
    """
    from ..task.metric import is_loss
    from ..train import measure

    if split not in ("dev", "test"):
        raise unknown("split", split, ("dev", "test"))
    flags = {name: value for name, value in given.items() if value is not None}
    config = Config.of({"method": "icl" if flags.get("shots") else "zero-shot", "eval_limit": limit, **flags})
    progress = view(quiet or json, json)
    try:
        result = measure(config, split, progress)
    finally:
        progress.close()
    if json:
        line = {
            "task": config.task, "metric": result.metric, "value": result.value, "n": result.n,
            "seconds": round(result.seconds, 3),
        }  # fmt: skip
        typer.echo(jsonlib.dumps(line))
        return
    exact = "" if result.exact_match is None else f", exact match {result.exact_match:.1%}"
    numbers = [f"{result.metric} {result.value:.1%}{exact}", f"loss {result.loss:.4f}"]
    if is_loss(result.metric):  # free text: the loss says more
        numbers.reverse()
    typer.echo(f"{config.task} {split}: {', '.join(numbers)} (n {result.n}, {result.seconds:.1f} s)")
