"""Training: the paper's protocol as one configuration, one loop and one folder.

    config = Config(model="smollm2", task="sst2", data="data", method="mezo_bcd", lr=3e-4, steps=2000)
    result = run(config, "runs/sst2")             # writes its folder as it goes; Ctrl-C stops it cleanly
    result = resume("runs/sst2")                  # continues bit for bit
    result.summary["test"]["selected"]

Names are imported on first use, so that the command line can read the settings without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Config
    from .loop import make, measure, resume, run
    from .session import Result

_HOME = {"Config": "config", "Result": "session", "make": "loop", "measure": "loop", "resume": "loop", "run": "loop"}
__all__ = ["Config", "Result", "make", "measure", "resume", "run"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
