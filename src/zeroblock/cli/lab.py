"""``zeroblock lab`` draws and checks the paper's theory, and measures its quantities on a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .flag import App

if TYPE_CHECKING:
    from ..lab.study import Study

app = App(
    help="Draw the paper's theory, check it numerically, measure its quantities on a model.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Out = Annotated[Path, typer.Option(help="Folder for the figures (PNG and PDF) and their numbers (CSV).")]
Seeds = Annotated[int | None, typer.Option(min=1, help="Seeds to average over.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Number of processes; by default one per core.")]
Quick = Annotated[bool, typer.Option("--quick", help="Use small sizes, for a look within a minute.")]
HERE = Path("lab")
TABLE, JOURNAL = "blocks.csv", "blocks.zbj"
"""The files that ``zeroblock lab blocks`` writes as it goes."""


def _missing() -> list[str]:
    """The plotting packages that are not installed."""
    import importlib.util

    return [name for name in ("matplotlib", "pandas", "scipy") if importlib.util.find_spec(name) is None]


def _require() -> None:
    """Fail with one line that says how to install the plotting packages if they are missing."""
    from ..errors import ZeroBlockError

    if _missing():
        raise ZeroBlockError(f"the lab needs {', '.join(_missing())}: pip install 'zeroblock[lab]'")


def _studies(quick: bool, seeds: int | None = None) -> dict[str, Study]:
    from ..lab import bounding, convergence, curves, distribution, rate, schedules, stability, tails

    given: dict[str, Any] = {} if seeds is None else {"seeds": seeds}
    if quick:
        few = {"seeds": 4, **given}
        return {
            "convergence": convergence.Convergence(64, 16, 16, 2e-3, 0.1, 1500, gammas=convergence.SHOWN, **few),
            "alignment": distribution.Distribution(256, 16, (16, 4), (16, 32, 64), 300),
            "curves": curves.Curves(256, 4, 16, (16, 64), 4e-4, (4e-4, 1e-3, 4e-3), 200, checked=40, **few),
            "schedules": schedules.Schedules(
                256, 4, 16, 16, (4e-4, 1e-3, 2e-3), 400, adaptive_lrs=(1e-3,), adaptive_seeds=2, **few
            ),
            "tails": tails.Tails(256, 4, 16, 16, 1000),
            "bounds": bounding.Bounding(
                (rate.Setting(64, 16, 16, 200), rate.Setting(64, 16, 2, 200)),
                tuple(stability.Setting(16, s, 100, 100) for s in (4, 16)),
                pairs=50, sets=50, draws=50_000, quadratics=2, **few,
            ),
        }  # fmt: skip
    return {
        "convergence": convergence.Convergence(**given),
        "alignment": distribution.Distribution(),
        "curves": curves.Curves(**given),
        "schedules": schedules.Schedules(**given),
        "tails": tails.Tails(),
        "bounds": bounding.Bounding(**given),
    }


@contextlib.contextmanager
def _progress(total: int) -> Iterator[tuple[Callable[[], None], Callable[[str], None]]]:
    """A progress bar: yields a function that advances it, and one that shows a message.

    Without a terminal, each message becomes a line with the seconds since the start.
    """
    import time

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console, begin = Console(stderr=True), time.monotonic()
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("lab", total=total)

        def say(text: str) -> None:
            progress.update(task, description=text)
            if not console.is_terminal:
                console.print(f"{time.monotonic() - begin:6.1f} s  {text}")

        yield lambda: progress.advance(task), say
        progress.update(task, description="lab")


def _carry_out(studies: Sequence[Study], out: Path, workers: int | None, summary: bool = False) -> None:
    """Run studies under one progress bar and print the folder they were written to."""
    from ..lab.runner import Runner
    from ..lab.study import carry_out, readme

    out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be made should fail before the work
    with (
        _progress(sum(study.jobs for study in studies)) as (tick, say),
        Runner(Runner.cores() if workers is None else workers, tick) as run,
    ):
        for study in studies:
            say(study.name)
            carry_out(study, out, run)
    if summary:
        readme(studies, out)
    typer.echo(str(out))


def _one(name: str) -> Callable[..., None]:
    def command(out: Out = HERE, seeds: Seeds = None, workers: Workers = None, quick: Quick = False) -> None:
        _require()
        _carry_out([_studies(quick, seeds)[name]], out, workers)

    return command


for _name, _help in (
    ("convergence", "Steps to a target against the alignment ρ̄, at a fixed and at each one's own learning rate."),
    ("curves", "The three projections at the same s, over learning rates."),
    ("schedules", "Which block to take: the best one, by alignment, or each in turn, over learning rates."),
    ("bounds", "Theorems 3.3 and 3.10 against runs; every lemma against simulation or quadrature."),
):
    app.command(_name, help=_help)(_one(_name))


def _one_seedless(name: str) -> Callable[..., None]:
    def command(out: Out = HERE, workers: Workers = None, quick: Quick = False) -> None:
        _require()
        _carry_out([_studies(quick)[name]], out, workers)

    return command


for _name, _help in (
    ("alignment", "The distribution of ρ for the three projections, and E[ρ] against its closed form."),
    ("tails", "The upper tails of ρ against Proposition 3.6."),
):
    app.command(_name, help=_help)(_one_seedless(_name))


@app.command("all")
def everything(out: Out = HERE, seeds: Seeds = None, workers: Workers = None, quick: Quick = False) -> None:
    """Run every study that needs no model, and write a README.md that explains each figure."""
    _require()
    _carry_out(list(_studies(quick, seeds).values()), out, workers, summary=True)


@app.command("adaptive")
def adaptive_run(
    run: Annotated[Path, typer.Argument(help="A run's folder, a journal, or a JSONL of step, block and coeffs.")],
    blocks: Annotated[
        int | None,
        typer.Option(min=1, help="For a JSONL: the number of blocks; by default the largest block visited plus one."),
    ] = None,
    out: Out = HERE,
    decay: Annotated[
        float, typer.Option(help="For a JSONL: the weight of a new coefficient in the moving average.")
    ] = 0.1,
    temperature: Annotated[float, typer.Option(help="For a JSONL: the softmax temperature.")] = 1.0,
    warmup: Annotated[
        int | None, typer.Option(min=0, help="For a JSONL: warm-up turns; by default 10 per block.")
    ] = None,
    signed: Annotated[bool, typer.Option("--signed", help="For a JSONL: scores average signed coefficients.")] = False,
    interval: Annotated[int, typer.Option(min=1, help="For a JSONL: steps per turn.")] = 1,
    costs: Annotated[
        str | None,
        typer.Option(help="Cost of a step on each block, as in 2,1,0.5: show a cost-aware schedule's choices, too."),
    ] = None,
    trajectories: Annotated[int, typer.Option(min=1, help="Number of simulated trajectories.")] = 1000,
    every: Annotated[int | None, typer.Option(min=1, help="Steps averaged in one column of the heat map.")] = None,
) -> None:
    """Diagnose an adaptive run: its selection probabilities over time and the share of each block.

    A journal holds the run's settings; a JSONL of records does not, so give them as options. Journals of zeroblock lab
    blocks also hold the costs of the blocks.
    """
    _require()
    from ..lab.adaptive import diagnose
    from ..schedule import Adaptive

    schedule = Adaptive(decay, temperature, warmup, signed)
    beside = None if costs is None else _economical(costs)
    study = diagnose(run, schedule, blocks, interval, economical=beside, trajectories=trajectories, every=every)
    _carry_out([study], out, workers=1)


@app.command("blocks")
def blocks_of_a_model(
    model: Annotated[str, typer.Option(help="smollm2, a local folder, a GGUF file, or a hub id.")],
    task: Annotated[str, typer.Option(help="A task's name (see zeroblock tasks), or a path to your own data.")],
    data: Annotated[Path | None, typer.Option(help="Folder that holds TASK/train.jsonl; by default the hub.")] = None,
    out: Out = HERE,
    partition: Annotated[str, typer.Option(help="whole, layers, layers:K or linears.")] = "layers",
    steps: Annotated[int, typer.Option(min=0, help="Steps of the adaptive run; 0 measures the start only.")] = 200,
    points: Annotated[int, typer.Option(min=1, help="Measurements along the run, not counting the start.")] = 1,
    lr: Annotated[float, typer.Option(help="Learning rate of the run.")] = 3e-4,
    eps: Annotated[float, typer.Option(help="Perturbation of the run and of the forward differences.")] = 1e-3,
    warmup: Annotated[
        int | None, typer.Option(min=0, help="Warm-up turns of the adaptive schedule; by default 3 per block.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Softmax temperature of the adaptive schedule.")] = 1.0,
    batch: Annotated[int, typer.Option(min=1, help="Examples per batch.")] = 4,
    batches: Annotated[int, typer.Option(min=1, help="Batches to measure on.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=4, help="Leave out longer examples.")] = 64,
    probes: Annotated[int, typer.Option(min=2, help="Random vectors per trace.")] = 4,
    iterations: Annotated[int, typer.Option(min=1, help="Lanczos iterations, for λmax.")] = 6,
    forward: Annotated[
        bool, typer.Option("--forward", help="Use forward passes only, without backpropagation.")
    ] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Measure both ways and draw their agreement.")] = False,
    sketch: Annotated[int, typer.Option(min=0, help="Vectors (5 or more) that bracket λmax with forward passes.")] = 0,
    costs: Annotated[
        str | None, typer.Option(help="Cost of a step on each block, as in 2,1,0.5; by default it is measured.")
    ] = None,
    rows_only: Annotated[
        bool, typer.Option("--rows-only", help="Draw no figures; zeroblock lab draw draws them later.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of data, probes and run.")] = 0,
    device: Annotated[str, typer.Option(help="Device of the model, for example cpu or cuda.")] = "cpu",
) -> None:
    """Measure a model block by block, with error bars: Tr(H_B), λmax, ρ_B, gradient norm, coefficient variance.

    It also shows the probabilities of the adaptive schedule, which the run follows, and of a cost-aware one. Rows and
    steps are written as they come; figures are drawn at the end, or later by zeroblock lab draw.
    """
    from .. import model as models
    from ..bench.cost import measured
    from ..block import by_name
    from ..engine.cost import relative, works
    from ..errors import ZeroBlockError
    from ..journal import Header, Journal
    from ..lab.depth import Depth, write
    from ..method import mezo_bcd_adaptive
    from ..schedule import Adaptive, Economical

    if sketch and sketch < 5:
        raise ZeroBlockError(f"--sketch takes 5 vectors or more (or 0 for no bracket), got {sketch}")
    cut, economical = by_name(partition), None if costs is None else _economical(costs)
    out.mkdir(parents=True, exist_ok=True)
    module, tokenizer = models.load(model, dtype="fp32", device=device), models.tokenizer(model)
    held, stream = _objectives(module, tokenizer, task, data, batch, batches, max_tokens, seed)
    n, name = len(cut(module)), Path(model).name.removesuffix(".gguf")
    schedule = Adaptive(temperature=temperature, warmup=3 * n if warmup is None else warmup)
    optimizer = mezo_bcd_adaptive(module, lr, eps, partition=cut, schedule=schedule, seed=seed)
    if economical is None:
        idle = mezo_bcd_adaptive(module, 0.0, eps, partition=cut, schedule=schedule, seed=seed)
        economical = Economical(relative(measured(idle, held[0]), works(module, idle.blocks)))
    economical.probabilities([0.0] * n)  # it refuses a wrong number of costs
    study = Depth(
        optimizer, [objective.__call__ for objective in held], stream,
        tuple(sorted({round(steps * i / points) for i in range(points + 1)})), economical,
        ("backward", "forward") if compare else ("forward",) if forward else ("backward",),
        probes, iterations, sketch, f"{name}, {task}, temperature {temperature:g}",
    )  # fmt: skip
    path = out / JOURNAL
    path.unlink(missing_ok=True)
    header = Header.of(optimizer, model=name, task=task, costs=list(economical.costs))
    with Journal.create(path, header) as journal, _progress(study.jobs) as (tick, say):
        write(study.rows(journal.append, tick, say), out / TABLE)
    if _missing() and not rows_only:
        typer.echo(
            f"no figures without {', '.join(_missing())}: zeroblock lab draw {out} draws them elsewhere", err=True
        )
    elif not rows_only:
        _draw(out, trajectories=1000)
    typer.echo(out)


@app.command("draw")
def draw_blocks(
    folders: Annotated[list[Path], typer.Argument(help="Folders that zeroblock lab blocks has written.")],
    trajectories: Annotated[int, typer.Option(min=1, help="Number of simulated trajectories.")] = 1000,
) -> None:
    """Draw the measurements of zeroblock lab blocks, even on another machine or of a run cut short; print a table."""
    _require()
    from ..lab.profile import HEADINGS

    lines = [line for folder in folders for line in _draw(folder, trajectories)]
    typer.echo("\n".join([f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|", *lines]))


def _draw(folder: Path, trajectories: int) -> list[str]:
    """Draw the table and the journal of a folder; return lines that summarize it."""
    from ..errors import ZeroBlockError
    from ..lab import figure, profile
    from ..lab.adaptive import diagnose
    from ..lab.runner import Runner
    from ..lab.study import carry_out
    from ..schedule import Adaptive

    frame = profile.read(folder / TABLE)
    with figure.style():
        for name, drawn in profile.draw(frame).items():
            figure.save(drawn, folder, name)
    try:
        carry_out(diagnose(folder / JOURNAL, Adaptive(), trajectories=trajectories), folder, Runner())
    except ZeroBlockError as error:  # the run took no steps, or ended during its warm-up
        typer.echo(f"{folder}: no figure of the schedule: {error}", err=True)
    return profile.summary(frame)


def _economical(costs: str) -> Any:
    """A cost-aware schedule from costs separated by commas."""
    from ..schedule import by_name

    return by_name(f"economical:{costs}")


def _objectives(
    module: Any, tokenizer: Any, task: str, data: Path | None, batch: int, batches: int, max_tokens: int, seed: int
) -> tuple[list[Any], Any]:
    """The batches to measure on, which the run does not see, and an endless stream of batches for the run."""
    import random

    from ..engine import Engine
    from ..errors import ZeroBlockError
    from ..task import get

    chosen = get(task, tokenizer)
    engine, encode = Engine(module), chosen.encoder(tokenizer)
    encoded = []
    for example in chosen.load(data, seed=seed).train:
        pair = chosen.training_pair(encode, example)
        if max(len(ids) for ids, _ in pair[0].rows) <= max_tokens:
            encoded.append(pair)
    need = batch * (batches + 1)
    if len(encoded) < need:
        raise ZeroBlockError(
            f"{task} has {len(encoded)} training examples of at most {max_tokens} tokens, but {need} are needed: raise "
            "--max-tokens, or lower --batch or --batches"
        )
    held, rest = encoded[: batch * batches], encoded[batch * batches :]

    def objective(examples: Sequence[tuple[Any, int]]) -> Any:
        batch, labels = zip(*examples, strict=True)
        return engine.objective(batch, labels, chosen.over)

    def stream() -> Any:
        generator = random.Random(seed)
        while True:
            yield objective(generator.sample(rest, batch))

    return [objective(held[i : i + batch]) for i in range(0, len(held), batch)], stream()
