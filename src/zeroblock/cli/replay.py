"""``zeroblock replay``: the weights after any step, from a journal and its base."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ZeroBlockError

Model = Annotated[
    str | None,
    typer.Option(help="The base: a folder, a GGUF file, a hub id or smollm2; by default the one the journal names."),
]
Out = Annotated[Path, typer.Option(help="A new folder for the weights, as safetensors that from_pretrained loads.")]
Step = Annotated[
    str | None,
    typer.Option(
        metavar="best|last|N",
        help="The step that dev selects, the last one, or a number of steps. [best; last without dev evaluations]",
        show_default=False,
    ),
]
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
    step: Step = None,
    device: Device = "auto",
    force: Force = False,
    trust_remote_code: Remote = False,
) -> None:
    """Rebuild the weights after any step, bit for bit.

    For example: `zeroblock replay runs/sst2 --out tuned`, then `from_pretrained("tuned")`

    A run with `--lora` or `--prefix` gives its adapter, as PEFT saves it. A run with `--method ft`
    has no journal; it keeps the weights of its best step, and replay copies these.
    """
    write_run(run, step, out, model, device, force, trust_remote_code)


def write_run(
    run: Path,
    step: str | None,
    out: Path,
    model: str | None,
    device: str,
    force: bool,
    trust_remote_code: bool,
    repo: str | None = None,
) -> None:
    """Write a run's weights and their card into a folder for ``from_pretrained``.

    Args:
        run: a run's folder, a journal or an exported file.
        step: best, last or a number; best by default.
        out: a new folder.
        model: the base; by default the one that the journal names.
        device: auto, cpu or cuda.
        force: accept other base weights, a newer journal, or one whose last record is damaged.
        trust_remote_code: run the code that comes with the model.
        repo: the repository on the hub that receives the folder; None if it is not sent.
    """
    from ..journal.format import locate
    from ..report.card import ANSWERING, AUTO, PLACEHOLDER, Facts, hub_card, pipeline_of

    folder = locate(run).parent
    if is_kept(run):
        taken = copy_kept(run, step, out)
    else:
        taken = write_weights(run, choose_step(run, step), out, model, device, force, trust_remote_code)
    if facts := Facts.read(folder, taken, out):
        (out / "README.md").write_text(hub_card(facts, "model", repo or PLACEHOLDER), encoding="utf-8")
    if repo is not None:
        return
    if (out / "adapter_config.json").is_file():
        typer.echo(f'load it with PeftModel.from_pretrained(base, "{out}"), or train it further with --model {out}')
    elif (pipeline := pipeline_of(out)) == ANSWERING:  # transformers 5 has no such pipeline
        typer.echo(f'load it with {AUTO[pipeline]}.from_pretrained("{out}")')
    else:
        typer.echo(f'load it with from_pretrained("{out}"), or pipeline("{pipeline}", model="{out}")')


def choose_step(run: Path, step: str | None) -> int | None:
    """Find the number of steps to take, None for all; print the choice unless the user made it.

    Args:
        run: a run's folder, a journal or an exported file.
        step: best, last or a number; None for best where the run has dev evaluations, else last.
    """
    from ..journal import read
    from ..journal.format import locate
    from ..report.summary import selection

    number = _parse(step)
    if step == "last" or number is not None:
        return number
    chosen = selection(locate(run).parent) if read(run, 0).header.steps is None else None
    if chosen is None or chosen.step < 1:
        if step == "best":
            raise ZeroBlockError(f"{run} has no dev evaluations to select a step by: give --step last, or a number")
        if read(run, 0).header.steps is None:
            typer.echo(f"{run} was not evaluated after its first step, so the last one is taken", err=True)
        return None
    try:
        read(run, chosen.step)
    except ZeroBlockError:  # the journal has lost that step, and its reader says what to do
        return None
    changed = "" if step else " (--step last takes the last one)"
    typer.echo(f"taking step {chosen.step:,}, selected by {chosen.by}{changed}", err=True)
    return chosen.step


def _parse(step: str | None) -> int | None:
    """The number in ``--step``, if it is one."""
    if step in (None, "best", "last"):
        return None
    if not (step.isascii() and step.isdecimal()):
        raise ZeroBlockError(f"--step is {step!r}: give best, last, or a number of steps")
    return int(step)


def is_kept(run: Path) -> bool:
    """Whether a run kept its weights and no journal, as ``ft`` does; a run that kept neither raises an error."""
    from ..journal.format import locate
    from ..train.config import BACKPROPAGATION, MEASURED, recorded
    from ..train.folder import Folder

    if not run.is_dir() or locate(run).exists() or not (run / "config.toml").is_file():
        return False
    method = recorded(run / "config.toml", trust_remote_code=True).method
    if method in MEASURED:
        raise ZeroBlockError(f"{run} is a run of {method}, which measures a model and does not change it")
    if method != BACKPROPAGATION:
        return False
    if not Folder(run).model.is_dir():
        raise ZeroBlockError(
            f"{run} is a run of ft without weights: it was stopped before its first evaluation, made with "
            "--no-save-weights, or by an earlier version; train again to keep them"
        )
    return True


def copy_kept(run: Path, step: str | None, out: Path) -> int:
    """Copy the weights that ``ft`` kept into a new folder; return their step.

    Args:
        run: the run's folder.
        step: best or nothing; another step is refused unless it is the one that was kept.
        out: a new folder.
    """
    import shutil

    from ..report.summary import selection
    from ..train.folder import Folder

    place, number, chosen = Folder(run).model, _parse(step), selection(run)
    kept = chosen.step if chosen else 0
    if step == "last":
        number = Folder(run).config(trust_remote_code=True).steps
    if number not in (None, kept):
        raise ZeroBlockError(f"ft keeps no journal, only the weights of step {kept:,}, which dev selects: in {place}")
    check_new(out)
    files = sorted(place.iterdir())
    if odd := next((file for file in files if file.is_symlink() or not file.is_file()), None):
        raise ZeroBlockError(f"{odd} is a link or a folder, which zeroblock does not write: copy {place} yourself")
    out.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(file, out / file.name)
    typer.echo(f"{out}: the weights that ft kept, of step {kept:,}; they are in {place} too")
    return kept


def check_new(out: Path) -> None:
    """Refuse a folder that is not empty or cannot be created; leave no new folder behind."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ZeroBlockError(f"{str(out)!r} exists already: give a new folder with --out")
    if not out.exists():
        out.mkdir(parents=True)
        out.rmdir()


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
) -> int:
    """Load the base, take the journal's steps, save the weights and the tokenizer; return the number of steps.

    Args:
        place: a run's folder, a journal or an exported file.
        step: steps to take; all by default.
        out: a new folder.
        model: the base; by default the one that the journal names.
        device: auto, cpu or cuda.
        force: accept other base weights, a newer journal, or one whose last record is damaged.
        trust_remote_code: run the code that comes with the model.
        way: the options of the command that take only the intact steps, see ``check_whole``.
        random_weights: whether the journal may ask for random weights, which take any amount of memory; by default
            a run's own journal may, and any other one only with ``force``.
    """
    from .. import model as models
    from ..journal import finite, read
    from ..journal.base import Base
    from ..journal.format import locate
    from ..journal.share import check_whole, is_own

    contents = read(place, step)
    if step is None:
        check_whole(contents, place, way=way, force=force)
    header = contents.header
    if random_weights is None:
        random_weights = force or is_own(contents, place)
    run = locate(place).parent if is_own(contents, place) else None
    base = Base(header, model, device, trust_remote_code, random_weights, run)
    check_new(out)
    base.check()
    module = base.load()
    optimizer = header.rebuild(module, force=force)
    with _bar(len(contents.records)) as progress:
        finite.advance(optimizer, contents.records, lambda: header.rebuild(base.load(), force=True), progress)
    models.save(module, out, base.tokenizer())
    steps = len(contents.records)
    typer.echo(f"{out}: {base.name} after {steps:,} step{'' if steps == 1 else 's'}")
    return steps


@contextlib.contextmanager
def _bar(steps: int) -> Iterator[Callable[[float], None]]:
    """A progress bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{steps:,} steps", total=1.0)
        yield lambda done: bar.update(task, completed=done)
