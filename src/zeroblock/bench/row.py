"""Measurements: the rows of the CSV files that ``zeroblock bench`` writes, each with machine, versions and date."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ..errors import ZeroBlockError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The columns that every kind of row has: the subject, the machine and the date of a measurement.

    Args:
        model: name or path.
        task: the task that the examples are from.
        method: a method of the library; with ``-reference``, the published procedure.
        device: ``cpu`` or ``cuda``.
        dtype: the dtype of the weights, or the integers that store them.
        batch_size: examples per step.
        machine: name of the processor.
        versions: versions of the measured software.
        date: date of the measurement.
    """

    model: str
    task: str
    method: str
    device: str
    dtype: str
    batch_size: int
    machine: str
    versions: str
    date: str
    command: ClassVar[str]
    """The command of ``zeroblock bench`` that writes such rows."""

    @property
    def odd(self) -> str:
        """The values that no measurement can have, as text; empty if there are none."""
        return ""

    @classmethod
    def columns(cls) -> list[str]:
        """The columns of a CSV of such rows; machine, versions and date are the last."""
        names = [field.name for field in dataclasses.fields(cls)]
        last = ("machine", "versions", "date")
        return [*(name for name in names if name not in last), *last]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchRow(Row):
    """The cost of a step of one method with one engine.

    Args:
        engine: ``sequential``, ``forked``, or ``reference``.
        steps: number of measured steps, without the warm-up; a multiple of ``cycle``.
        cycle: number of steps in which every block has its turn; 1 if there is one block.
        median_ms, q20_ms, q80_ms, mean_ms: statistics of the steps. In block methods a step's time depends on the
            depth of the block.
        peak_bytes: peak memory, weights included; None if it could not be measured.
        weights_bytes: size of the weights alone.
        ratio_to_reference: the mean of ``mezo-reference`` over this mean, which is the ratio of the times of
            two long runs; None if ``mezo-reference`` was not in the run.
        ratio_of_medians: the same ratio from the medians.
        gemm_floor_ms: time of the step's products with the weights alone, at the measured
            speed of this machine for matrices of these shapes; None if the layers are not made of plain matrices.
        copy_floor_ms: time of the reads and writes that perturbation and update need, at the measured copy speed.
        tokens: packed tokens per batch, on average.
        tokens_padded: tokens per batch if each option is a row padded to a multiple of 8, on average.
    """

    engine: str
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
    command: ClassVar[str] = "step"

    @property
    def odd(self) -> str:
        fine = self.engine in ("reference", "sequential", "forked") and math.isfinite(self.mean_ms)
        return "" if fine else f"engine {self.engine!r}, mean_ms {self.mean_ms}"


Kind = TypeVar("Kind", bound=Row)


def append(path: Path, measurements: Sequence[Kind], kind: type[Kind]) -> None:
    """Append measurements to a CSV, with a header if it is new. An empty list only checks that it can be written.

    Args:
        path: the CSV; one that has a header keeps the order of its columns.
        measurements: all of one kind.
        kind: their class.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    header = check(path, kind)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=header or kind.columns(), lineterminator="\n")
        if not header:
            writer.writeheader()
        writer.writerows(map(dataclasses.asdict, measurements))


def read(path: Path, kind: type[Kind]) -> list[Kind]:
    """Read the measurements of a CSV.

    Args:
        path: the CSV, with its columns in any order.
        kind: the class of its rows.
    """
    if not path.is_file():
        raise ZeroBlockError(f"no file {str(path)!r}; write it with: zeroblock bench {kind.command} --csv {path}")
    check(path, kind)
    types = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    measurements: list[Kind] = []
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            try:
                one = kind(**{name: _value(line[name], of) for name, of in types.items()})
                if one.odd:
                    raise ValueError(one.odd)
            except (KeyError, TypeError, ValueError) as error:
                number = len(measurements) + 1
                raise ZeroBlockError(f"{path}: row {number} is not a row of bench {kind.command} ({error})") from error
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


def check(path: Path, kind: type[Row]) -> list[str]:
    """Reject a file that holds anything but rows of a kind; return its columns, or an empty list if it is new."""
    if not path.exists() or not path.stat().st_size:
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header = next(csv.reader(file), [])
    except UnicodeDecodeError as error:
        raise ZeroBlockError(f"{path} is not UTF-8, so zeroblock bench did not write it; give another file") from error
    if sorted(header) != sorted(kind.columns()):
        raise ZeroBlockError(f"{path} has other columns than bench {kind.command} writes; give another file")
    return header


def _value(text: str, kind: str) -> Any:
    if text == "" and "None" in kind:
        return None
    if kind == "bool":
        return {"True": True, "False": False}[text]
    if kind.startswith("int"):
        return int(text)
    return float(text) if kind.startswith("float") else text
