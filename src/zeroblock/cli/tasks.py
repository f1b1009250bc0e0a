"""``zeroblock tasks``: the list of tasks, and what their examples look like."""

from __future__ import annotations

import functools
import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import unknown

if TYPE_CHECKING:
    from ..task import Encoded, Example, Task

app = typer.Typer(invoke_without_command=True)

SPLITS = ("train", "dev", "test")


@app.callback()
def tasks(
    context: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """List the tasks, or show the examples of one.

    A path is a task too.  A .jsonl or .csv (or a folder with train.jsonl and validation.jsonl) of
    `prompt` and `completion`, joined as they are written, or of chat `messages`.  A .toml that names
    columns, a template and options:

        train = "train.csv"                # JSONL or CSV, beside this file
        validation = "test.csv"            # optional: else rows are held out
        prompt = "{text} It was"           # {text} is the column text
        options = [" terrible", " great"]  # or the name of a column of lists
        label = "sentiment"                # the column that says which is right
        labels = ["neg", "pos"]            # its values, unless 0, 1 or the options

    or, to generate, in place of options and label:

        answer = " {reply}\\n"             # where reply is a list, all are right
        max_new_tokens = 50               # generated at most
    """
    if context.invoked_subcommand is not None:
        return
    from ..task import TASKS

    rows = [_described(task) for task in TASKS.values()]
    if json:
        typer.echo(jsonlib.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table()
    for column in ("task", "kind", "metric", "from", "columns"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(row["name"], row["kind"], row["metric"], row["source"], ", ".join(row["fields"]))
    console.print(table)
    console.print(
        "zeroblock tasks show NAME prints examples. A path is a task too: a .jsonl or .csv of prompt and completion, "
        "or of chat messages; a folder of them; a .toml that names columns, a template and options.",
        markup=False,
        highlight=False,
    )


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A task, or the path of one's own data.")],
    data: Annotated[
        Path | None, typer.Option(help="A folder with NAME/train.jsonl and NAME/validation.jsonl, or with these two.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many examples.")] = 3,
    split: Annotated[
        str | None, typer.Option(help="train, dev or test, in the protocol's order; else train.jsonl as it lies.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="The data seed of --split.")] = 0,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer", "--model", help="A model's folder, GGUF file or hub id, to count tokens; else smollm2."
        ),
    ] = None,
    max_length: Annotated[int, typer.Option(min=2, help="Longer contexts are cut on the left.")] = 2048,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Print examples as the model will read them, with their options and numbers of tokens.

    JSON has the numbers where a tokenizer is named.
    """
    from ..model import tokenizer as read_tokenizer
    from ..task import get

    if split is not None and split not in SPLITS:
        raise unknown("split", split, SPLITS)
    loaded = read_tokenizer(tokenizer) if tokenizer is not None else None
    task = get(name, loaded)
    examples, note = _examples(task, data, split, seed, limit)
    counting = loaded if loaded is not None or json else _default_tokenizer()
    encoder = task.encoder(counting, max_length) if counting is not None else None
    encoded = [encoder.example(example) for example in examples] if encoder else [None] * len(examples)
    if json:
        for example, ids in zip(examples, encoded, strict=True):
            typer.echo(jsonlib.dumps(_object(task, example, ids), ensure_ascii=False))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for number, (example, ids) in enumerate(zip(examples, encoded, strict=True), start=1):
        _print(console, task, example, ids, f"{task.name} {split or 'train'} {number}")
    if encoder:
        room = task.max_new_tokens if task.metric.generates else 0
        cut = sum(
            bool(ids and ids.cut) or (room > 0 and encoder.prompt(example, room).cut > 0)
            for example, ids in zip(examples, encoded, strict=True)
        )
        whose = "" if tokenizer else " (SmolLM2's; another model's with --tokenizer)"
        console.print(f"{cut} of {len(examples)} contexts cut to {max_length} tokens{whose}", markup=False)
    else:
        console.print("give --tokenizer MODEL to count tokens", markup=False)
    if note:
        console.print(note, markup=False)


@functools.cache
def _default_tokenizer() -> Any:
    """That of the embedded model, where it is installed."""
    from ..errors import ZeroBlockError
    from ..model import tokenizer

    try:
        return tokenizer("smollm2")
    except ZeroBlockError:
        return None


def _described(task: Task) -> dict[str, Any]:
    return {
        "name": task.name,
        "summary": task.summary,
        "kind": task.kind,
        "objective": task.objective,
        "metric": task.metric.name,
        "source": str(task.source),
        "fields": list(task.fields),
    }


def _examples(
    task: Task, data: Path | None, split: str | None, seed: int, limit: int
) -> tuple[tuple[Example, ...], str]:
    if split is not None:
        splits = task.load(data, seed=seed)
        return getattr(splits, split)[:limit], splits.note
    rows = task.rows("train", data)
    # The whole of a file, not the first few rows: a look at the data is when one wants to hear of a bad one.
    checked = rows if isinstance(rows, list) else rows[:limit]
    return tuple(task.example(row) for row in checked)[:limit], ""


def _object(task: Task, example: Example, ids: Encoded | None) -> dict[str, Any]:
    found: dict[str, Any] = {"context": example.context, "options": list(example.options)}
    found |= {"answers": list(example.answers)} if task.metric.generates else {"label": example.label}
    if ids is not None:
        found["tokens"] = {"context": len(ids.context), "options": list(map(len, ids.options)), "cut": ids.cut}
    return found


def _print(console: Any, task: Task, example: Example, ids: Encoded | None, title: str) -> None:
    from rich.text import Text

    console.rule(
        Text(f"{title}  ({len(ids.context)} tokens{', cut' if ids.cut else ''})" if ids else title), align="left"
    )
    console.print(Text(example.context), soft_wrap=True)
    for index, option in enumerate(example.options):
        # quoted, because a leading space or a newline is part of the option
        line = Text(f"{'→' if index in example.right else ' '} {option!r}")
        if index in example.right:
            line.stylize("bold green")
        if ids is not None:
            count = len(ids.options[index])
            line.append(f"  {count} token{'s' if count > 1 else ''}", style="dim")
        console.print(line, soft_wrap=True)
    if task.metric.generates:
        console.print(Text(f"  answers: {', '.join(map(repr, example.answers))}", style="dim"), soft_wrap=True)
