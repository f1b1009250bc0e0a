"""``zeroblock tasks``: list the tasks, and show their examples."""

from __future__ import annotations

import functools
import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import shown, unknown
from .replay import Remote

if TYPE_CHECKING:
    from ..task import Encoded, Example, Task

app = typer.Typer(invoke_without_command=True)

SPLITS = ("train", "dev", "test")
MAX_CHARACTERS = 1_000_000
"""Of a line of a prompt that is printed."""


@app.callback()
def tasks(
    context: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """List the tasks, or show the examples of one.

    The path of your own data is a task too: a .jsonl or .csv file (or a folder with train.jsonl and
    validation.jsonl) with the columns `prompt` and `completion`, joined as they are written, or with
    chat `messages`; or a .toml file that names columns, a template and options:

        train = "train.csv"                # JSONL or CSV, beside this file
        validation = "test.csv"            # optional: else rows are held out
        prompt = "{text} It was"           # {text} is the column text
        options = [" terrible", " great"]  # or the name of a column of lists
        label = "sentiment"                # the column with the right option
        labels = ["neg", "pos"]            # its values, unless 0, 1 or the options

    or, to generate, in place of options and label:

        answer = " {reply}\\n"             # if reply is a list, all are right
        max_new_tokens = 50               # the most that is generated
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
        "zeroblock tasks show NAME prints examples. The path of your own data is a task too: a .jsonl or .csv file of "
        "prompt and completion, or of chat messages; a folder of them; or a .toml file (see zeroblock tasks --help).",
        markup=False,
        highlight=False,
    )


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A task, or the path of your own data.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with NAME/train.jsonl and NAME/validation.jsonl, or with these two files."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of examples.")] = 3,
    split: Annotated[
        str | None,
        typer.Option(help="train, dev or test, as a run splits them; by default the first rows of train.jsonl."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="The data seed of --split.")] = 0,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer", "--model", help="Count tokens as this model does: a folder, GGUF file or hub id. [smollm2]"
        ),
    ] = None,
    max_length: Annotated[int, typer.Option(min=2, help="Cut longer contexts on the left.")] = 2048,
    trust_remote_code: Remote = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")] = False,
) -> None:
    """Print examples as the model will read them, with their options and token counts.

    JSON has the counts only if you name a tokenizer.
    """
    from ..model import tokenizer as read_tokenizer
    from ..task import get

    if split is not None and split not in SPLITS:
        raise unknown("split", split, SPLITS)
    loaded = read_tokenizer(tokenizer, trust_remote_code=trust_remote_code) if tokenizer is not None else None
    task = get(name, loaded)
    examples, note = _examples(task, data, split, seed, limit)
    counting = loaded if loaded is not None or json else _default_tokenizer()
    encoder = task.encoder(counting, max_length) if counting is not None else None
    encoded = [encoder.example(example) for example in examples] if encoder else [None] * len(examples)
    if json:
        for example, ids in zip(examples, encoded, strict=True):
            line = jsonlib.dumps(_object(task, example, ids), ensure_ascii=False)
            # JSON leaves some control characters as they are, and a terminal would obey them
            typer.echo(line if line.isprintable() else jsonlib.dumps(jsonlib.loads(line)))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for number, (example, ids) in enumerate(zip(examples, encoded, strict=True), start=1):
        _print(console, task, example, ids, f"{shown(task.name)} {split or 'train'} {number}")
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
        console.print(shown(note, MAX_CHARACTERS), markup=False)


@functools.cache
def _default_tokenizer() -> Any:
    """The tokenizer of the default model, if it is installed."""
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
        "over": task.over,
        "objective": task.over,  # its name until 0.1
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
    # All rows of a file are checked, not only those shown: whoever looks at the data wants to hear of a bad row.
    checked = rows if isinstance(rows, list) else rows[:limit]
    return tuple(task.example(row) for row in checked)[:limit], ""


def _object(task: Task, example: Example, ids: Encoded | None) -> dict[str, Any]:
    line: dict[str, Any] = {"context": example.context, "options": list(example.options)}
    line |= {"answers": list(example.answers)} if task.metric.generates else {"label": example.label}
    if ids is not None:
        line["tokens"] = {"context": len(ids.context), "options": list(map(len, ids.options)), "cut": ids.cut}
    return line


def _print(console: Any, task: Task, example: Example, ids: Encoded | None, title: str) -> None:
    from rich.text import Text

    console.rule(
        Text(f"{title}  ({len(ids.context)} tokens{', cut' if ids.cut else ''})" if ids else title), align="left"
    )
    # line by line, so that newlines stay; other control characters of the file are shown and not obeyed
    context = "\n".join(shown(line, MAX_CHARACTERS) for line in example.context.split("\n"))
    console.print(Text(context), soft_wrap=True)
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
