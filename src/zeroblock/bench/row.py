"""Measurements: the rows of ``results/bench.csv``, one per variant, with machine, versions and date."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ZeroBlockError


@dataclasses.dataclass(frozen=True)
class BenchRow:
    """The cost of a step of one method with one engine.

    Args:
        model: name or path.
        task: the task that the examples are from.
        method: a method of the library; with ``-reference``, the published procedure.
        engine: ``sequential``, ``forked``, or ``reference``.
        device: ``cpu`` or ``cuda``.
        dtype: of the weights.
        batch_size: examples per step.
        steps: number of measured steps, without the warm-up; a multiple of ``cycle``.
        cycle: number of steps in which every block has its turn; 1 if there is one block.
        median_ms, q20_ms, q80_ms, mean_ms: of the steps. Steps of block methods differ by the depth of the block.
        peak_bytes: peak memory, weights included; None if it could not be measured.
        weights_bytes: size of the weights alone.
        ratio_to_reference: the mean of ``mezo-reference`` over this mean, which is the ratio of the times of
            two long runs; None if ``mezo-reference`` was not in the run.
        ratio_of_medians: the same ratio from the medians.
        gemm_floor_ms: time of the step's products with the weights alone, at the speed this machine was measured
            to multiply matrices of these shapes; None if the layers are not made of plain matrices.
        copy_floor_ms: time to read and write what perturbation and update must, at the measured speed of a copy.
        tokens: packed tokens per batch, on average.
        tokens_padded: tokens per batch if each option is a row padded to a multiple of 8, on average.
        machine: name of the processor.
        versions: of the software that was measured.
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


FIELDS = {field.name: str(field.type) for field in dataclasses.fields(BenchRow)}


def append(path: Path, measurements: Sequence[Any], kind: type = BenchRow) -> None:
    """Append measurements to a CSV, with a header if it is new. An empty list only checks that it can be written.

    Args:
        path: the CSV.
        measurements: dataclasses of one kind.
        kind: their class.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    has_header = path.exists() and path.stat().st_size > 0
    check(path, kind)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=_columns(kind), lineterminator="\n")
        if not has_header:
            writer.writeheader()
        writer.writerows(map(dataclasses.asdict, measurements))


def read(path: Path) -> list[BenchRow]:
    """Read the measurements of a CSV."""
    if not path.is_file():
        raise ZeroBlockError(f"no file {str(path)!r}; write it with: zeroblock bench step --csv {path}")
    check(path)
    measurements: list[BenchRow] = []
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            try:
                one = BenchRow(**{name: _value(line[name], kind) for name, kind in FIELDS.items()})
                if one.engine not in ("reference", "sequential", "forked") or not math.isfinite(one.mean_ms):
                    raise ValueError(f"engine {one.engine!r}, mean_ms {one.mean_ms}")
            except (TypeError, ValueError) as error:
                number = len(measurements) + 1
                raise ZeroBlockError(f"{path}: row {number} is not one of bench step's ({error})") from error
            measurements.append(one)
    return measurements


def latest(measurements: Sequence[BenchRow]) -> list[BenchRow]:
    """The last measurement of each variant: a new one replaces an old one."""
    kept: dict[tuple[Any, ...], BenchRow] = {}
    for one in measurements:
        key = (one.model, one.task, one.method, one.engine, one.device, one.dtype, one.batch_size, one.machine)
        kept.pop(key, None)
        kept[key] = one
    return list(kept.values())


def check(path: Path, kind: type = BenchRow) -> None:
    """Refuse a file that holds something else than measurements of a kind."""
    if not path.exists() or not path.stat().st_size:
        return
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header = next(csv.reader(file), [])
    except UnicodeDecodeError as error:
        raise ZeroBlockError(f"{path} is not UTF-8, so zeroblock bench did not write it; give another file") from error
    if header != _columns(kind):
        name = {"BenchRow": "step", "RunRow": "run"}.get(kind.__name__, "ranks")
        raise ZeroBlockError(f"{path} has other columns than bench {name} writes; give another file")


def _columns(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _value(text: str, kind: str) -> Any:
    if text == "" and "None" in kind:
        return None
    if kind.startswith("int"):
        return int(text)
    return float(text) if kind.startswith("float") else text
