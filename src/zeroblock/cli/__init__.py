"""The command ``zeroblock``: one file per subcommand.

Subcommand files import torch and transformers inside their functions, so that
``--help`` answers at once.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
import warnings
from typing import Annotated, Any

import typer

from ..errors import ZeroBlockError, ZeroBlockWarning, shown
from ..train.launch import leave
from ..train.peers import RankError
from . import (
    apply,
    bench,
    bench_methods,
    bench_ranks,
    bench_stream,
    blocks,
    demo,
    doctor,
    evaluate,
    export,
    inspect,
    lab,
    methods,
    plan,
    push,
    race,
    replay,
    report,
    resume,
    schedule,
    sweep,
    tasks,
    train,
)
from .flag import App

MAX_MESSAGE = 4000
"""Maximum characters of a printed message."""

CommandLineError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""The base class of every mistake in the arguments. typer does not export it, and its module depends on the version."""

app = App(
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


ELSEWHERE = {
    "--learning-rate": "--lr", "--learning_rate": "--lr", "--lr-scheduler-type": "--lr-schedule",
    "--max-steps": "--steps", "--max_steps": "--steps", "--output-dir": "--out", "--output_dir": "--out",
    "--output": "--out", "--dataset": "--task", "--dataset-name": "--task", "--model-name-or-path": "--model",
    "--model_name_or_path": "--model", "--zo-eps": "--eps", "--zo_eps": "--eps", "--task_name": "--task",
    "--per-device-train-batch-size": "--batch-size", "--per_device_train_batch_size": "--batch-size",
    "--gradient-accumulation-steps": "--accumulate", "--gradient_accumulation_steps": "--accumulate",
    "--eval-steps": "--eval-every", "--eval_steps": "--eval-every", "--report-to": "--track", "--report_to": "--track",
}  # fmt: skip
"""Our options by their names in MeZO's code and in Hugging Face's examples."""

app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
app.command("resume")(resume.resume)
app.command("sweep")(sweep.sweep)
app.command("race")(race.race)
app.command("report")(report.report)
app.command("replay")(replay.replay)
app.command("inspect")(inspect.inspect)
app.command("export")(export.export)
app.command("apply")(apply.apply)
app.command("push")(push.push)
app.command("methods")(methods.methods)
app.command("blocks")(blocks.blocks)
app.command("schedule")(schedule.schedule)
app.add_typer(tasks.app, name="tasks")
bench.app.command("methods")(bench_methods.methods)
bench.app.command("ranks")(bench_ranks.ranks)
bench.app.command("stream")(bench_stream.stream)
app.add_typer(bench.app, name="bench")
app.add_typer(lab.app, name="lab")


def main() -> None:
    """Run the command line. A user's mistake becomes one line on stderr and exit status 2."""
    warnings.showwarning = _show_warning
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show ± is no reason to fail
    try:
        code = app(standalone_mode=False)
    except RankError as error:  # one rank prints it for all
        leave(_fail(str(error), 2, "") if error.shown else 2)
    except ZeroBlockError as error:
        leave(_fail(str(error), 2))
    except CommandLineError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # typer has printed the help already
            leave(2)
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "zeroblock"
        message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        option = ELSEWHERE.get(getattr(error, "option_name", ""))
        if context and option and any(option in parameter.opts for parameter in context.command.params):
            message = f"No such option: {error.option_name}; here it is {option}"  # type: ignore[attr-defined]
        leave(_fail(f"{message} (see {where} --help)", 2))
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        leave(end.code)
    except (KeyboardInterrupt, typer.Abort):
        leave(_fail("interrupted", 130))
    except BrokenPipeError:  # `zeroblock … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        leave(_fail(f"{where}{error.strerror or error}", 2))
    except Exception:
        if "RANK" not in os.environ:
            raise
        traceback.print_exc()
        leave(1)
    if code == 130:  # typer turns a KeyboardInterrupt into this; commands with their own message raise SystemExit
        _fail("interrupted", 130)
    leave(code if isinstance(code, int) else 0)


def _show_warning(message: Warning | str, category: type[Warning], filename: str, *rest: Any, **more: Any) -> None:
    """Print our own warnings in one line, and those of other packages only if Python was asked for them (``-W``)."""
    if os.environ.get("RANK", "0") != "0":  # rank 0 prints the same warning
        return
    if issubclass(category, ZeroBlockWarning) or sys.warnoptions:
        typer.echo(f"zeroblock: warning: {shown(' '.join(str(message).split()), MAX_MESSAGE)}", err=True)


def _fail(message: str, code: int, who: str | None = None) -> int:
    """Print an error in one line; if there are several ranks, the line names the one that failed."""
    if who is None:
        size, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "0")
        who = f"rank {rank}: " if size != "1" else ""
    typer.echo(f"zeroblock: {who}{shown(' '.join(message.split()), MAX_MESSAGE)}", err=True)
    return code
