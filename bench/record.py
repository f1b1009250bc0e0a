"""What every benchmark shares: timing, and rows of a CSV that name machine and versions."""

from __future__ import annotations

import csv
import datetime
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def machine(device: str) -> str:
    """The processor's name."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {torch.get_num_threads()} threads"
    return platform.processor() or platform.machine()


def seconds(run: Callable[[], object], device: str, repeats: int = 15, warm: int = 2) -> float:
    """Median seconds of a call: wall clock on the CPU, device events on a GPU."""
    for _ in range(warm):
        run()
    if device == "cuda":
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, end in pairs:
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) / 1e3 for start, end in pairs)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def positive(text: str) -> int:
    """A number from 1 on, for argparse."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def writable(path: str, columns: list[str] | None = None) -> Path:
    """A file that rows can be added to, or an end in one line.

    Args:
        path: of the CSV.
        columns: its columns, where they are known.
    """
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
        with file.open(newline="") as handle:
            found = next(csv.reader(handle), None)
    except OSError as error:
        sys.exit(f"cannot write to {path}: {error.strerror}")
    if columns is not None and found is not None and found != columns:
        sys.exit(f"{path} has other columns: give another --csv")
    return file


def append(path: str | None, rows: list[dict[str, Any]], device: str) -> None:
    """Append rows to a CSV, each with date, machine and versions."""
    if not path:
        return
    common = {
        "date": datetime.date.today().isoformat(),
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
