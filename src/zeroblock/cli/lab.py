"""``zeroblock lab`` draws and checks the paper's theory, and measures its quantities on a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..lab.study import Study

app = typer.Typer(
    help="Draw the paper's theory, check it numerically, measure its quantities on a model.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Out = Annotated[Path, typer.Option(help="Folder for the figures (PNG and PDF) and their numbers (CSV).")]
Seeds = Annotated[int | None, typer.Option(min=1, help="Seeds to average over.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Number of processes; by default one per core.")]
Quick = Annotated[bool, typer.Option("--quick", help="Use small sizes, for a look within a minute.")]
HERE = Path("lab")


def _require() -> None:
    """Fail with one line that says how to install the plotting packages if they are missing."""
    import importlib.util

    from ..errors import ZeroBlockError

    missing = [name for name in ("matplotlib", "pandas", "scipy") if importlib.util.find_spec(name) is None]
    if missing:
        raise ZeroBlockError(f"the lab needs {', '.join(missing)}: pip install 'zeroblock[lab]'")


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


def _carry_out(studies: Sequence[Study], out: Path, workers: int | None, summary: bool = False) -> None:
    """Run studies under one progress bar and print the folder they were written to."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ..lab.runner import Runner
    from ..lab.study import carry_out, readme

    out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be made should fail before the work
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        total = progress.add_task("lab", total=sum(study.jobs for study in studies))
        with Runner(Runner.cores() if workers is None else workers, lambda: progress.advance(total)) as run:
            for study in studies:
                progress.update(total, description=study.name)
                if not console.is_terminal:
                    console.print(study.name)
                carry_out(study, out, run)
        progress.update(total, description="lab")
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
    trajectories: Annotated[int, typer.Option(min=1, help="Number of simulated trajectories.")] = 1000,
    every: Annotated[int | None, typer.Option(min=1, help="Steps averaged in one column of the heat map.")] = None,
) -> None:
    """Diagnose an adaptive run: its selection probabilities over time and the share of each block.

    A journal holds the run's settings; a JSONL of records does not, so give them as options.
    """
    _require()
    from ..lab.adaptive import diagnose
    from ..schedule import Adaptive

    schedule = Adaptive(decay, temperature, warmup, signed)
    study = diagnose(run, schedule, blocks, interval, trajectories=trajectories, every=every)
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
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of data, probes and run.")] = 0,
    device: Annotated[str, typer.Option(help="Device of the model, for example cpu or cuda.")] = "cpu",
) -> None:
    """Measure a model block by block, with error bars: Tr(H_B), λmax, ρ_B, gradient norm, coefficient variance."""
    _require()
    import dataclasses
    import json

    from torch.nn.attention import SDPBackend, sdpa_kernel

    from .. import model as models
    from ..block import by_name
    from ..errors import ZeroBlockError
    from ..lab.depth import Depth
    from ..schedule import Adaptive

    if sketch and sketch < 5:
        raise ZeroBlockError(f"--sketch takes 5 vectors or more (or 0 for no bracket), got {sketch}")
    cut = by_name(partition)
    module, tokenizer = models.load(model, dtype="fp32", device=device), models.tokenizer(model)
    n = len(cut(module))
    held, stream = _closures(module, tokenizer, task, data, batch, batches, max_tokens, seed)
    study = Depth(
        module, held, stream, cut, tuple(sorted({round(steps * i / points) for i in range(points + 1)})), lr, eps,
        Adaptive(temperature=temperature, warmup=3 * n if warmup is None else warmup),
        ("backward", "forward") if compare else ("forward",) if forward else ("backward",),
        probes, iterations, sketch, seed, f"{Path(model).stem}, {task}",
    )  # fmt: skip
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels cannot be differentiated twice
        _carry_out([study], out, workers=1)
    if study.records:
        with (out / "blocks_records.jsonl").open("w", encoding="utf-8") as file:
            for record in study.records:
                file.write(json.dumps(dataclasses.asdict(record)) + "\n")


def _closures(
    module: Any, tokenizer: Any, task: str, data: Path | None, batch: int, batches: int, max_tokens: int, seed: int
) -> tuple[list[Callable[[], Any]], Any]:
    """The batches to measure on, which the run does not see, and the run's own batches, without end."""
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

    def objective(examples: Sequence[tuple[Any, int]]) -> Callable[[], Any]:
        batch, labels = zip(*examples, strict=True)
        # one point after another: second differences need the same rounding in all three losses
        return engine.objective(batch, labels, chosen.over).__call__

    def stream() -> Any:
        generator = random.Random(seed)
        while True:
            yield objective(generator.sample(rest, batch))

    return [objective(held[i : i + batch]) for i in range(0, len(held), batch)], stream()
