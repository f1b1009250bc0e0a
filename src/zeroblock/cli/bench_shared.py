"""Shared by the commands of ``zeroblock bench``: options, the model and the examples to measure on, and the rows."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, TypeVar

import typer

from ..errors import ZeroBlockError, unknown

if TYPE_CHECKING:
    import torch

    from ..bench.batch import Pool
    from ..bench.row import Row

STAND_IN = "smollm2"
"""The model whose tokenizer is used if a model has none; its ids are taken modulo the model's vocabulary."""
MAX_TOKENS = 2048
"""Longer contexts are cut on the left, as MeZO does."""
GRAPHS = {"auto": None, "on": True, "off": False}
FOLDER = "A folder with NAME/train.jsonl and NAME/validation.jsonl; by default the data come from the hub."

Task = Annotated[str, typer.Option(help="The task whose examples are measured.")]
Tasks = Annotated[str, typer.Option("--task", help="One task, or several separated by commas.")]
Model = Annotated[str, typer.Option(help="A folder, GGUF file, hub id, or a shape with random weights.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Examples per step.")]
Data = Annotated[Path | None, typer.Option(help=FOLDER)]
Device = Annotated[str, typer.Option(help="cpu, cuda or auto.")]
Dtype = Annotated[str, typer.Option(help="fp32, fp16, bf16, or auto: fp16 on cuda, fp32 on the CPU.")]
Graphs = Annotated[str, typer.Option(help="CUDA graphs: auto, on or off.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON list.")]
Csv = Annotated[Path | None, typer.Option(help="Append each row to this file as soon as it is measured.")]
EncodedFile = Annotated[
    Path | None, typer.Option(help="A file of bench encode, or a folder of TASK.jsonl, instead of --data.")
]
Tokenizer = Annotated[
    str | None,
    typer.Option(help=f"Model whose tokenizer to use; by default its own, or {STAND_IN}'s for an OPT shape."),
]

Kind = TypeVar("Kind", bound="Row")


class Stand(NamedTuple):
    """The model and the examples that a command measures on.

    Args:
        model: the model, loaded on its device.
        pools: examples by task, with token ids that the model knows.
        idle: bytes that the process held before the model was loaded.
    """

    model: Any
    pools: dict[str, Pool]
    idle: int


def stand(
    model: str,
    tasks: Sequence[str],
    data: Path | None,
    encoded: Path | None,
    tokenizer: str | None,
    device: str,
    dtype: str,
    *,
    seed: int = 0,
    weights: str | None = None,
) -> Stand:
    """Read the examples of some tasks, check that the model can take them, and load it."""
    from .. import model as models
    from ..bench.step import resident

    where = models.find_device(device)
    pools = {name: pool_of(name, model, data, encoded, tokenizer, seed) for name in tasks}
    config: Any = models.skeleton(model).config  # before idle: imports are not the model's memory
    for name, pool in pools.items():
        _check_lengths(pool, config, name)
    idle = resident()
    say(f"{model} on {where}")
    loaded = _loaded(model, where, dtype, weights)
    return Stand(loaded, {name: pool.folded(int(config.vocab_size)) for name, pool in pools.items()}, idle)


class Sheet(Generic[Kind]):
    """The rows of a command, appended to a CSV as soon as they are measured.

    A file that cannot be written, or that holds something else, fails here, before anything is measured.

    Args:
        kind: the class of the rows.
        csv: the file; None for none.
    """

    def __init__(self, kind: type[Kind], csv: Path | None) -> None:
        self.kind, self.csv = kind, csv
        self.rows: list[Kind] = []
        self._append([])

    def add(self, row: Kind) -> None:
        """Take one more row."""
        self.rows.append(row)
        self._append([row])

    def show(self, json: bool, table: Callable[[list[Kind]], None]) -> None:
        """Print all rows: as one JSON list, or as a table."""
        if json:
            typer.echo(jsonlib.dumps([asdict(row) for row in self.rows], indent=2))
        else:
            table(self.rows)

    def _append(self, rows: list[Kind]) -> None:
        from ..bench.row import append

        if self.csv is not None:
            append(self.csv, rows, self.kind)


def listed(text: str) -> list[str]:
    """Names separated by commas, at least one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ZeroBlockError("the list of names is empty: separate names by commas")
    return names


def graphed(text: str) -> bool | None:
    """The setting of an engine for ``--graphs``."""
    if text not in GRAPHS:
        raise unknown("choice of --graphs", text, GRAPHS)
    return GRAPHS[text]


def pool_of(name: str, model: str, data: Path | None, encoded: Path | None, tokenizer: str | None, seed: int) -> Pool:
    """The examples of a task, from token ids or from the data; for an OPT shape they begin as OPT's tokenizer does."""
    from .. import model as models
    from ..bench import batch
    from ..task import get

    shape = model in models.OPT
    if encoded is not None:
        if data is not None or tokenizer is not None:
            raise ZeroBlockError("--encoded takes the place of --data and --tokenizer: give one or the other")
        pool = batch.read(encoded / f"{name}.jsonl" if encoded.is_dir() else encoded, get(name).over)
    elif any(models.reads(model).values()):
        raise ZeroBlockError(f"bench measures models that continue a text, and {model} does not: give a decoder")
    else:
        reader = models.tokenizer(tokenizer or (STAND_IN if shape else model))
        limit = _positions(models.config(model)) - shape  # a token is left for the BOS
        pool = batch.encode(get(name, reader), data, reader, seed=seed, max_length=limit)
    return pool.begun(models.config(model).bos_token_id) if shape else pool


def say(text: str) -> None:
    """Print a progress message to stderr, so that the output stays clean."""
    typer.echo(text, err=True)


def _positions(config: Any) -> int:
    return min(MAX_TOKENS, getattr(config, "max_position_embeddings", None) or MAX_TOKENS)


def _check_lengths(pool: Pool, config: Any, task: str) -> None:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and pool.longest > limit:
        raise ZeroBlockError(
            f"{task} has an example of {pool.longest} tokens, but the model reads {limit}: "
            f"encode with --max-length {limit}"
        )


def _loaded(name: str, device: torch.device, dtype: str, weights: str | None) -> Any:
    from .. import model as models

    # the published procedures use fp16 where the library would choose bf16
    kind = "fp16" if dtype == "auto" and device.type == "cuda" else dtype
    return models.load(name, kind, device, random_weights=name in models.OPT, weights=weights)
