"""``zeroblock replay``: the weights after any step, from a journal and its base."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ZeroBlockError, shown

Model = Annotated[
    str | None,
    typer.Option(help="The base: a folder, a GGUF file, a hub id or smollm2; by default the one the journal names."),
]
Out = Annotated[Path, typer.Option(help="A new folder for the weights, as safetensors that from_pretrained loads.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Accept other base weights, a journal of a newer zeroblock, or a damaged last record."
    ),
]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Run the Python code that comes with the model.")]


def replay(
    run: Annotated[Path, typer.Argument(help="A run's folder, a journal or an exported file.")],
    out: Out,
    model: Model = None,
    step: Annotated[int | None, typer.Option(min=0, help="Stop after this many steps; all by default.")] = None,
    device: Device = "auto",
    force: Force = False,
    trust_remote_code: Remote = False,
) -> None:
    """Rebuild the weights after any step, bit for bit."""
    write_weights(run, step, out, model, device, force, trust_remote_code)


def write_weights(
    place: Path,
    step: int | None,
    out: Path,
    model: str | None,
    device: str,
    force: bool,
    trust_remote_code: bool,
    *,
    way: str = "--step {steps} (or --force)",
    random_weights: bool | None = None,
) -> None:
    """Load the base, take the journal's steps, save the weights and the tokenizer.

    Args:
        place: a run's folder, a journal or an exported file.
        step: steps to take; all by default.
        out: a new folder.
        model: the base; by default the one that the journal names.
        device: auto, cpu or cuda.
        force: accept other base weights, a newer journal, or one whose last record is damaged.
        trust_remote_code: run the code that comes with the model.
        way: the options of the command that take the steps before a loss, see ``check_whole``.
        random_weights: whether the journal may ask for random weights, which take any amount of memory; by default
            the one in a run's folder may, and another one if forced.
    """
    import torch

    from .. import adapter
    from .. import model as models
    from ..journal import finite, read
    from ..journal.format import locate
    from ..journal.share import check_whole, is_own

    contents = read(place, step)
    if step is None:
        check_whole(contents, place, way=way, force=force)
    header = contents.header
    name = model or header.model
    if not name:
        raise ZeroBlockError("the journal does not name its base: give --model")
    if model is None and shown(name, 4096) != name:
        raise ZeroBlockError(f"the journal names its base '{shown(name)}', which is no name: give --model")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ZeroBlockError(f"{str(out)!r} exists already: give a new folder with --out")
    named = header.extra.get("dtype")
    known = models.DTYPES.get(named) if isinstance(named, str) else None
    dtype = known if header.dtype == "mixed" else getattr(torch, header.dtype)  # one of four, as its reader has checked
    if dtype is None:
        raise ZeroBlockError("the base has several dtypes: load it in Python, then zeroblock.load(model, FILE)")
    if model in models.OPT:
        raise ZeroBlockError(f"{model} is a shape without weights: give the base that the run began with")
    if not out.exists():  # a folder that cannot be written is noticed now, and none is left if the base is wrong
        out.mkdir(parents=True)
        out.rmdir()
    random = model is None and header.extra.get("random_weights") is True
    if random_weights is None:
        random_weights = force or is_own(contents, place)
    if random and not random_weights:
        raise ZeroBlockError(
            f"the file asks for random weights in the shape of {name}, which may take any amount of memory: give the "
            "base with --model, or allow it with --force"
        )
    made = adapter.recorded(header.extra)
    if not trust_remote_code and not models.is_stored_quantised(name):  # a skeleton runs no code of the model's
        header.check_order(models.skeleton(name, adapter=made))  # before any memory is taken for the weights

    def base() -> Any:
        with _out_of_memory(f"{name} in {header.dtype}"):
            loaded = models.load(
                name,
                dtype,
                device,
                random_weights=random,
                seed=header.seed,
                trust_remote_code=trust_remote_code,
                adapter=made,
            )
        if is_own(contents, place):
            adapter.restart_(loaded, locate(place).parent)
        return loaded

    module = base()
    optimizer = header.rebuild(module, force=force)
    with _bar(len(contents.records)) as progress:
        finite.advance(optimizer, contents.records, lambda: header.rebuild(base(), force=True), progress)
    models.save(module, out, models.tokenizer(name, trust_remote_code=trust_remote_code))
    typer.echo(f"{out}: {name} after {len(contents.records):,} steps")


@contextlib.contextmanager
def _out_of_memory(weights: str) -> Iterator[None]:
    """Turn memory that runs out into one line."""
    import torch

    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not known and "can't allocate memory" not in str(error):
            raise
        raise ZeroBlockError(
            f"{weights} does not fit into the memory of this device: choose another --device, or a larger machine"
        ) from error


@contextlib.contextmanager
def _bar(steps: int) -> Iterator[Callable[[float], None]]:
    """A progress bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{steps:,} steps", total=1.0)
        yield lambda done: bar.update(task, completed=done)
