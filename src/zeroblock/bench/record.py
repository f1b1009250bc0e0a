"""Rows of ``results/bench.csv``: one a variant measured, with machine, versions and date."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ZeroBlockError


@dataclasses.dataclass(frozen=True)
class Row:
    """What a step of one method with one engine costs.

    Args:
        model: name or place.
        task: whose examples.
        method: a method of the library, or ``-reference``: the published procedure.
        engine: ``sequential``, ``forked``, or ``reference``.
        device: ``cpu`` or ``cuda``.
        dtype: of the weights.
        batch_size: examples a step.
        steps: measured, after the warm-up; whole cycles of ``cycle`` steps.
        cycle: steps until every block has had its turn; 1 where there is one block.
        median_ms, q20_ms, q80_ms, mean_ms: of a step. Steps of block methods differ by the depth of the block.
        peak_bytes: most memory in use, weights included; None where it could not be measured.
        weights_bytes: of the weights alone.
        ratio_to_reference: mean of ``mezo-reference`` over this mean, which is the ratio of the times of
            two long runs; None where ``mezo-reference`` was not in the run.
        ratio_of_medians: the same from the medians.
        gemm_floor_ms: the step's products with the weights alone, at the speed this machine was measured to
            multiply matrices of these shapes; None where the layers are not made of plain matrices.
        copy_floor_ms: reading and writing what perturbation and update must, at the measured speed of a copy.
        tokens: packed, mean a batch.
        tokens_padded: each option a row padded to a multiple of 8, mean a batch.
        machine: processor.
        versions: of what was run.
        date: of the measurement.
    """

    model: str
    task: str
    method: str
    engine: str
    device: str
    dtype: str
    batch_size: int
    steps: int
    cycle: int
    median_ms: float
    q20_ms: float
    q80_ms: float
    mean_ms: float
    peak_bytes: int | None
    weights_bytes: int
    ratio_to_reference: float | None
    ratio_of_medians: float | None
    gemm_floor_ms: float | None
    copy_floor_ms: float
    tokens: int
    tokens_padded: int
    machine: str
    versions: str
    date: str


FIELDS = {field.name: str(field.type) for field in dataclasses.fields(Row)}


def append(path: Path, rows: Sequence[Row]) -> None:
    """Add rows to a CSV, with a header where it is new; none at all is a way to see whether it can be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    old = path.exists() and path.stat().st_size > 0
    check(path)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(FIELDS), lineterminator="\n")
        if not old:
            writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)


def read(path: Path) -> list[Row]:
    """The rows of a CSV."""
    if not path.is_file():
        raise ZeroBlockError(f"no file {str(path)!r}; write it with: zeroblock bench step --csv {path}")
    check(path)
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            try:
                row = Row(**{name: _value(line[name], kind) for name, kind in FIELDS.items()})
                if row.engine not in ("reference", "sequential", "forked") or not math.isfinite(row.mean_ms):
                    raise ValueError(f"engine {row.engine!r}, mean_ms {row.mean_ms}")
                rows.append(row)
            except (TypeError, ValueError) as error:
                raise ZeroBlockError(f"{path}: row {len(rows) + 1} is not one of bench step's ({error})") from error
    return rows


def latest(rows: Sequence[Row]) -> list[Row]:
    """The last row of each variant measured: a new measurement replaces an old one."""
    kept: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (row.model, row.task, row.method, row.engine, row.device, row.dtype, row.batch_size, row.machine)
        kept.pop(key, None)
        kept[key] = row
    return list(kept.values())


def machine(device: str) -> str:
    """The processor's name; on the CPU with the number of threads."""
    import torch

    if device == "cuda":
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    count = torch.get_num_threads()
    return f"{name}, {count} thread{'s' if count > 1 else ''}"


def versions() -> str:
    """Of Python and of what does the work."""
    import torch
    import transformers

    from .. import __version__

    return (
        f"zeroblock {__version__}, python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )


def today() -> str:
    """ISO date."""
    return datetime.date.today().isoformat()


def check(path: Path) -> None:
    """Refuse a file that holds something else."""
    if not path.exists() or not path.stat().st_size:
        return
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header = next(csv.reader(file), [])
    except UnicodeDecodeError as error:
        raise ZeroBlockError(f"{path} is not UTF-8, and so nothing that bench step wrote") from error
    if header != list(FIELDS):
        raise ZeroBlockError(f"{path} has other columns than bench step writes; give another file")


def _value(text: str, kind: str) -> Any:
    if text == "" and "None" in kind:
        return None
    if kind.startswith("int"):
        return int(text)
    return float(text) if kind.startswith("float") else text
