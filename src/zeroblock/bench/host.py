"""The machine and the versions that every measurement names."""

from __future__ import annotations

import datetime
import platform
from pathlib import Path
from typing import Any


def machine(device: str) -> str:
    """The name of the processor; for the CPU with the number of threads."""
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
    """The versions of zeroblock, Python, torch and transformers."""
    import torch
    import transformers

    from .. import __version__

    return (
        f"zeroblock {__version__}, python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )


def stamp(device: str) -> dict[str, Any]:
    """Machine, versions and date of a measurement, which end its row."""
    return {"machine": machine(device), "versions": versions(), "date": today()}


def today() -> str:
    """Today's date in ISO format."""
    return datetime.date.today().isoformat()
