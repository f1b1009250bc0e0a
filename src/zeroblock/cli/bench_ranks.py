"""``zeroblock bench ranks``: the speedup of the running ranks, and the cost of their messages."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ZeroBlockError
from ..train.config import TIMEOUT_SECONDS, Config
from ..train.launch import Launch
from .bench_shared import EncodedFile, Sheet, say
from .train import settings

if TYPE_CHECKING:
    from ..bench.ranks import RanksRow

COMMAND = "torchrun --standalone --nproc-per-node 2 -m zeroblock bench ranks …"


@settings(
    "model", "random_weights", "dtype", "device", "task", "data", "dev", "max_length", "method", "batch_size",
    "accumulate", "probes", "parallel", "shares", "engine", "graphs", "max_tokens",
)  # fmt: skip
def ranks(
    steps: Annotated[int, typer.Option(min=1, help="Timed steps, repeated three times after a warm-up.")] = 20,
    encoded: EncodedFile = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Append the row to this file.")] = None,
    **given: Any,
) -> None:
    """Measure a step, its message and an evaluation on the ranks that torchrun started, compared with one process.

    One rank (`--nproc-per-node 1`) sends messages to itself, which shows what they cost on a GPU.
    """
    launch = Launch.of()
    if launch is None:
        raise ZeroBlockError(f"nothing has started this process as a rank: use {COMMAND}")
    if encoded is not None and given.get("data") is not None:
        raise ZeroBlockError("--encoded takes the place of --data: give one or the other")
    values = {name: value for name, value in given.items() if value is not None}
    values |= {"random_weights": True} if _is_shape(values.get("model")) else {}
    config = Config.of({"lr": 0.0, **values})
    sheet = Sheet(_kind(), csv if launch.rank == 0 else None)
    with launch.joined(config.device, TIMEOUT_SECONDS, alone=True):
        row = _measured(config, steps, encoded, launch.rank == 0)
    if launch.rank > 0:
        return
    sheet.add(row)
    _print(row, json)


def _is_shape(model: Any) -> bool:
    from .. import model as models

    return model in models.OPT


def _kind() -> type[RanksRow]:
    from ..bench.ranks import RanksRow

    return RanksRow


def _measured(config: Config, steps: int, encoded: Path | None, speaks: bool) -> RanksRow:
    from ..bench import ranks as bench
    from ..train.joint import load, shared
    from ..train.peers import Peers
    from ..train.workload import resolve

    def tell(text: str) -> None:
        if speaks:
            say(text)

    peers = Peers.here()
    config = shared(resolve(config), peers, tell, begins=True)
    config = config.replace(parallel=config.parallel or "data")
    if encoded is None:
        return bench.measure(load(config, peers, tell), peers, steps, tell)
    return bench.measure(peers.together(lambda: bench.encoded(config, encoded)), peers, steps, tell)


def _print(row: RanksRow, json: bool) -> None:
    from dataclasses import asdict

    if json:
        typer.echo(jsonlib.dumps(asdict(row), indent=2))
        return
    ranks = f"{row.ranks} ranks share {row.parallel}" if row.ranks > 1 else "one rank, with itself"
    typer.echo(f"{row.model}, {row.task}, {row.method}: {ranks}")
    typer.echo(
        f"  step        {row.alone_ms:.3g} ms alone, {row.step_ms:.3g} ms together: × {row.speedup:.2f}, "
        f"{row.step_ms / row.alone_ms - 1:+.1%}"
    )
    sender = "captured with the step" if row.captured else "sent by the host"
    typer.echo(f"  message     {row.message_us:.0f} µs by itself, {row.message_bytes} bytes, {sender}")
    typer.echo(f"  checksum    {row.checksum_ms:.1f} ms")
    if not row.examples:
        return
    typer.echo(
        f"  evaluation  {row.evaluate_alone_s:.2f} s alone, {row.evaluate_s:.2f} s together: "
        f"× {row.evaluate_speedup:.2f} ({row.examples} examples)"
    )
