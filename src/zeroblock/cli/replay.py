"""``zeroblock replay``: the weights of any step, from a journal and its base."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ZeroBlockError

if TYPE_CHECKING:
    from ..journal import Contents

Model = Annotated[
    str | None,
    typer.Option(help="The base: a folder, a GGUF file, a hub id or smollm2; by default what the journal names."),
]
Out = Annotated[Path, typer.Option(help="A new folder for the weights, safetensors that from_pretrained loads.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Force = Annotated[
    bool, typer.Option("--force", help="Take other base weights, or a journal of another version of zeroblock.")
]

Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Run the code that comes with the model.")]


def replay(
    run: Annotated[Path, typer.Argument(help="A run's folder, a journal or an exported file.")],
    out: Out,
    model: Model = None,
    step: Annotated[int | None, typer.Option(min=0, help="After so many steps; all by default.")] = None,
    device: Device = "auto",
    force: Force = False,
    trust_remote_code: Remote = False,
) -> None:
    """Rebuild the weights of any step, bit for bit."""
    from ..journal import read

    write_weights(read(run, step), out, model, device, force, trust_remote_code)


def write_weights(
    contents: Contents, out: Path, model: str | None, device: str, force: bool, trust_remote_code: bool
) -> None:
    """Load the base, take the journal's steps, save the weights and the tokenizer."""
    import torch

    from .. import model as models
    from ..journal import replay as take

    header = contents.header
    name = model or header.model
    if not name:
        raise ZeroBlockError("the journal does not name its base: give --model")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ZeroBlockError(f"{str(out)!r} is there already: give a new folder with --out")
    if header.dtype == "mixed":
        raise ZeroBlockError("the base has several dtypes: load it in Python, then zeroblock.load(model, FILE)")
    if contents.torn:
        typer.echo(f"zeroblock: warning: the journal ends with {contents.note}, which are left out", err=True)
    if model in models.OPT:
        raise ZeroBlockError(f"{model} is a shape without weights: give the base that the run began with")
    if not out.exists():  # a place that cannot be written is found out now, and nothing is left if the base is wrong
        out.mkdir(parents=True)
        out.rmdir()
    random = model is None and header.extra.get("random_weights") is True
    module = models.load(
        name,
        getattr(torch, header.dtype),
        device,
        random_weights=random,
        seed=header.seed,
        trust_remote_code=trust_remote_code,
    )
    optimizer = header.rebuild(module, force=force)
    with _bar(len(contents.records)) as progress:
        take(optimizer, contents.records, progress)
    optimizer.settle()
    _save(module, models.tokenizer(name, trust_remote_code=trust_remote_code), out)
    typer.echo(f"{out}: {name} after {len(contents.records):,} steps")


def _save(module: Any, tokenizer: Any, out: Path) -> None:
    if getattr(module.config, "quantization_config", None) is not None:
        # a GGUF's weights were expanded when they were read, but transformers refuses to save what came quantized
        module.hf_quantizer = None
        del module.config.quantization_config
    from ..model import bars

    with bars():
        module.save_pretrained(out)
        tokenizer.save_pretrained(out)


@contextlib.contextmanager
def _bar(steps: int) -> Iterator[Callable[[float], None]]:
    """A progress bar on stderr, where somebody is looking."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{steps:,} steps", total=1.0)
        yield lambda done: bar.update(task, completed=done)
