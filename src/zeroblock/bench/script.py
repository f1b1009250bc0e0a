"""Shared code of the scripts in ``bench/``: timing, and rows of a CSV that name the machine and the versions."""

from __future__ import annotations

import csv
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .host import machine as machine
from .host import today


def seconds(run: Callable[[], object], device: str, repeats: int = 15, warm: int = 2) -> float:
    """Median seconds of a call: wall clock on the CPU, device events on a GPU.

    Args:
        run: the call.
        device: ``cpu`` or ``cuda``.
        repeats: number of timed calls.
        warm: number of untimed calls before them.
    """
    for _ in range(warm):
        run()
    if device == "cuda":
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, end in pairs:
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(float(start.elapsed_time(end)) / 1e3 for start, end in pairs)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def writable(path: str, columns: list[str] | None = None) -> Path:
    """Check that rows can be appended to a CSV; exit with one line if they cannot.

    Args:
        path: the CSV.
        columns: the columns of the rows, if they are known.
    """
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
        with file.open(newline="") as handle:
            header = next(csv.reader(handle), None)
    except OSError as error:
        sys.exit(f"cannot write to {path}: {error.strerror}")
    if columns is not None and header is not None and header != columns:
        sys.exit(f"{path} has other columns: give another --csv")
    return file


def append(path: str | None, rows: list[dict[str, Any]], device: str) -> None:
    """Append rows to a CSV, each with date, machine and versions.

    Args:
        path: the CSV; None writes nothing.
        rows: all with the same columns.
        device: the device that they were measured on: ``cpu`` or ``cuda``.
    """
    if not path:
        return
    common = {
        "date": today(),
        "machine": machine(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    columns = [*rows[0], *common]
    file = writable(path, columns)
    with file.open("a", newline="") as handle:
        writer = csv.DictWriter(handle, fieldnames=columns)
        if not file.stat().st_size:
            writer.writeheader()
        writer.writerows({**row, **common} for row in rows)
