"""``zeroblock apply``: apply a fine-tune from a file to its base."""

from __future__ import annotations

from typing import Annotated

import typer

from .replay import Device, Force, Model, Out, Remote, write_weights


def apply(
    file: Annotated[str, typer.Argument(help="A file that zeroblock export wrote, or user/name on the hub.")],
    out: Out,
    model: Model = None,
    device: Device = "auto",
    force: Force = False,
    trust_remote_code: Remote = False,
) -> None:
    """Apply an exported fine-tune to its base model, bit for bit.

    For example: `zeroblock apply tuned.zbj --model BASE --out tuned`
    """
    from ..hub import find

    write_weights(find(file), None, out, model, device, force, trust_remote_code, way="--force", random_weights=force)
