"""Runs ``zeroblock`` commands in processes of their own, and kills them when told to.

A process of this kind has imported everything and run next to nothing, so that a fork
of it is a fresh command without the seconds that imports take.  One JSON object a line:

    {"log": FILE, "words": [...]}                                → its exit status
    {"log": FILE, "words": [...], "seconds": 0.3}                → the same, or null if it was killed by then
    {"log": FILE, "words": [...], "file": PATH, "size": 1000}    → the same, killed when the file has grown to that
    {"log": FILE, "words": [...], "bare": true}                  → its exit status; a run draws no figures
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

PATIENCE_S = 900  # not imported from toy: this runs as a script of its own


def warm() -> None:
    """Import what a run imports, and load its compiled loops."""
    for name in ("matplotlib.pyplot", "transformers.models.llama.modeling_llama", "zeroblock.train.loop"):
        importlib.import_module(name)
    import torch

    from zeroblock import ops
    from zeroblock.noise import Draw, Key

    for dtype in (torch.float32, torch.bfloat16):
        ops.add_noise_(torch.zeros(8, dtype=dtype), Draw(Key(0, 0)), 1.0)


def command(log: str, words: list[str]) -> int:
    """The command line; its exit status."""
    from zeroblock.cli import main

    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.argv = ["zeroblock", *words]
    try:
        main()
    except SystemExit as stopped:
        return stopped.code if isinstance(stopped.code, int) else 1
    return 1


def serve(task: dict[str, Any]) -> int | None:
    child = os.fork()
    if child == 0:
        code = 1
        if task.get("bare"):
            sys.modules["matplotlib"] = None  # type: ignore[assignment]
        try:
            code = command(task["log"], task["words"])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    end = time.monotonic() + task.get("seconds", PATIENCE_S)
    file, size = Path(task.get("file", os.devnull)), task.get("size", 1)
    while time.monotonic() < end and not (file.exists() and file.stat().st_size >= size):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return None if status == -signal.SIGKILL else status


if __name__ == "__main__":
    warm()
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)
