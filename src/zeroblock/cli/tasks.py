"""``zeroblock tasks``: list the tasks, and show their examples."""

from __future__ import annotations

import functools
import json as jsonlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import shown, unknown
from .flag import App
from .replay import Remote

if TYPE_CHECKING:
    from ..task import Encoded, Example, Task

app = App(invoke_without_command=True)

SPLITS = ("train", "dev", "test")
MAX_CHARACTERS = 1_000_000
"""Maximum characters of a printed line of a prompt."""


@app.callback()
def tasks(
    context: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """List the tasks, or show the examples of one.

    Your own data are a task too: the path of a .jsonl, .json, .csv or .parquet file (or of a folder
    that holds train and validation in one of these formats), or a dataset of the hub, hf:user/name.
    The columns say what they are:

        prompt, completion                 # joined as they are written
        messages                           # chats with role and content
        conversations                      # chats with from and value
        instruction, input, output         # Alpaca

    Others are described in a .toml file that names columns, a template and options:

        train = "train.csv"                # in this file's folder; or "hf:user/name"
        validation = "test.csv"            # optional: else rows are held out
        prompt = "{text} It was"           # {text} is the column text
        options = [" terrible", " great"]  # or the name of a column of lists
        label = "sentiment"                # the column with the right option
        labels = ["neg", "pos"]            # its values, unless 0, 1 or the options

    or, to generate, in place of options and label:

        answer = " {reply}"                # if reply is a list, all are right
        metric = "f1"                      # or exact_match, or likelihood
        max_new_tokens = 50                # maximum length of an answer
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
        "zeroblock tasks show NAME prints examples. Your own data are a task too: a .jsonl, .json, .csv or .parquet "
        "file or hf:user/name, of completions, chats or instructions; or a .toml file (see zeroblock tasks --help).",
        markup=False,
        highlight=False,
    )


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A task, the path of your own data, or hf:user/name.")],
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
    turns: Annotated[
        str, typer.Option(help="The answers of your own chats that carry loss: all or last.", metavar="all|last")
    ] = "all",
    ending: Annotated[
        str,
        typer.Option(help="What the completions of your own data end with: eos or newline.", metavar="eos|newline"),
    ] = "eos",
    max_length: Annotated[int, typer.Option(min=2, help="Cut longer contexts on the left.")] = 2048,
    trust_remote_code: Remote = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")] = False,
) -> None:
    """Print examples as the model will read them, with their options and token counts.

    Text in green, after → or between ⟦ and ⟧, is what a run learns to write. JSON has the counts only if you
    name a tokenizer.
    """
    from ..model import reads
    from ..model import tokenizer as read_tokenizer
    from ..task import get

    if split is not None and split not in SPLITS:
        raise unknown("split", split, SPLITS)
    if tokenizer is not None:
        words = read_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
    else:
        words = None if json else _default_tokenizer()
    task = get(name, words, turns=turns, ending=ending)
    examples, note = _examples(task, data, split, seed, limit)
    kind = {} if tokenizer is None else reads(tokenizer, trust_remote_code=trust_remote_code)
    encoder = task.encoder(words, max_length, **kind) if words is not None else None
    encoded = [encoder.example(example) for example in examples] if encoder else [None] * len(examples)
    ends = task.kind == "generation" and (task.stop is None or kind.get("seq2seq", False))
    end = str(getattr(words, "eos_token", None) or "<eos>") if ends else ""
    if kind.get("masked"):
        examples = tuple(_with_gap(example, str(words.mask_token)) for example in examples)
    elif kind.get("seq2seq"):
        examples = tuple(replace(one, options=tuple(map(str.strip, one.options))) for one in examples)
    if json:
        for example, ids in zip(examples, encoded, strict=True):
            line = jsonlib.dumps(_object(task, example, ids, end), ensure_ascii=False)
            # JSON leaves some control characters as they are, and a terminal would interpret them
            typer.echo(line if line.isprintable() else jsonlib.dumps(jsonlib.loads(line)))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for number, (example, ids) in enumerate(zip(examples, encoded, strict=True), start=1):
        _print(console, task, example, ids, f"{shown(task.name)} {split or 'train'} {number}", end)
    console.rule()
    facts = _facts(task)
    if encoder:
        room = task.max_new_tokens if task.metric.generates else 0
        cut = sum(
            bool(ids and ids.cut) or (room > 0 and encoder.prompt(example, room).cut > 0)
            for example, ids in zip(examples, encoded, strict=True)
        )
        whose = "" if tokenizer else ", counted by SmolLM2's tokenizer (another model's with --tokenizer)"
        facts["length"] = f"{cut} of {len(examples)} contexts cut to {max_length} tokens (--max-length){whose}"
    else:
        facts["length"] = "give --tokenizer MODEL to count tokens"
    if note:
        facts["split"] = note
    for label, fact in facts.items():
        told = Text(f"{label:<8}", style="dim").append(shown(fact, MAX_CHARACTERS), style="not dim")
        console.print(told, soft_wrap=True)


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
    # Check all rows of a file, not only those shown: users who look at their data want to know of a bad row.
    checked = rows if isinstance(rows, list) else rows[:limit]
    return tuple(task.example(row) for row in checked)[:limit], ""


def _with_gap(example: Example, mask: str) -> Example:
    """The example as a masked language model reads it, with the mask in place of an option."""
    from ..task.encoding import FULL_STOP

    before, after = example.gap or (example.context, FULL_STOP)
    words = tuple(option.strip() for option in example.options)
    return replace(example, context=f"{before.rstrip()} {mask}{after}".lstrip(), options=words)


def _object(task: Task, example: Example, ids: Encoded | None, end: str) -> dict[str, Any]:
    line: dict[str, Any] = {"context": example.context, "options": list(example.options)}
    line |= {"label": example.label} if task.kind != "generation" else {"answers": list(example.answers)}
    if end:
        line["end"] = end
    if example.spans:
        line["spans"] = [example.context[slice(*span)] for span in example.spans]
    if ids is not None:
        line["tokens"] = {
            "context": len(ids.context),
            "options": list(map(len, ids.options)),
            "scored": list(map(sum, ids.marks)),
            "cut": ids.cut,
        }
        if ids.scored is None:
            del line["tokens"]["scored"]
    return line


def _print(console: Any, task: Task, example: Example, ids: Encoded | None, title: str, end: str) -> None:
    from rich.text import Text

    heading = [title, *([Path(shown(example.where)).name] if example.where else [])]
    if ids is not None:
        total = len(ids.context) + (len(ids.options[0]) if len(ids.options) == 1 else 0)
        heading.append(f"{total:,} tokens{', cut' if ids.cut else ''}")
    console.rule(Text("  ·  ".join(heading)), align="left")
    console.print(_context(example), soft_wrap=True)
    for index, option in enumerate(example.options):
        # quoted, because a leading space or a newline is part of the option
        line = Text(f"{'→' if index in example.right else ' '} {(option.removesuffix(end) if end else option)!r}")
        if index in example.right:
            line.stylize("bold green")
        if end:
            line.append(f" {shown(end)}", style="bold cyan" if index in example.right else "")
        if ids is not None:
            count = sum(ids.marks[index])
            whose = " with the earlier answers" if example.spans else ""
            line.append(f"  {count} token{'s' if count > 1 else ''}{whose}", style="dim")
        console.print(line, soft_wrap=True)
    if task.metric.generates and (len(example.answers) > 1 or example.answers[0] != example.target.strip()):
        console.print(Text(f"  answers: {', '.join(map(repr, example.answers))}", style="dim"), soft_wrap=True)


def _context(example: Example) -> Any:
    """The context with the earlier answers marked."""
    from rich.text import Text

    text, done = Text(), 0
    for begin, stop in example.spans:
        text.append(_lines(example.context[done:begin]))
        text.append(f"⟦{_lines(example.context[begin:stop])}⟧", style="bold green")
        done = stop
    return text.append(_lines(example.context[done:]))


def _lines(text: str) -> str:
    """Escape the control characters of a text, except newlines."""
    return "\n".join(shown(line, MAX_CHARACTERS) for line in text.split("\n"))


def _facts(task: Task) -> dict[str, str]:
    """The data, the loss and the metric of a task, in words."""
    if task.over == "options":
        loss = "cross-entropy over the options"
    else:
        loss = "on the green tokens: their mean in a batch, or by example (--loss-over tokens|examples)"
    metric = task.metric.name
    if task.metric.of_loss:
        metric = "held-out loss, stored as likelihood = exp(-loss); F1 says little about long answers"
    elif task.metric.generates:
        metric += " of the generated answer, and exact match"
    return {"data": task.summary, "loss": loss, "metric": metric}
