"""The command ``zeroblock``: one file a subcommand.

Subcommand files import torch and transformers inside their functions, so that
``--help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import click
import typer

from ..errors import ZeroBlockError
from . import blocks, demo, methods, schedule

app = typer.Typer(
    name="zeroblock",
    help="Fine-tune language models with forward passes only, one block at a time.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from .. import __version__

        typer.echo(f"zeroblock {__version__}")
        raise typer.Exit


app.command("demo")(demo.demo)
app.command("methods")(methods.methods)
app.command("blocks")(blocks.blocks)
app.command("schedule")(schedule.schedule)


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit status 2."""
    try:
        code = app(standalone_mode=False)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "zeroblock"
        message = " ".join(error.format_message().split())
        sys.exit(_fail(f"{message or 'missing command'} (see {where} --help)", 2))
    except (click.ClickException, ZeroBlockError) as error:
        sys.exit(_fail(" ".join(str(error).split()), 2))
    except (KeyboardInterrupt, click.Abort):
        sys.exit(_fail("interrupted", 130))
    except BrokenPipeError:  # `zeroblock … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> int:
    typer.echo(f"zeroblock: {message}", err=True)
    return code
