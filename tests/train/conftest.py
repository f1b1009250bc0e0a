"""One thread, and the models and data that the tests of runs share."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from loop_toy import models  # noqa: F401 (fixtures)

from run_toy import data, llama, opt, single_thread  # noqa: F401 (fixtures)

sys.path.append(str(Path(__file__).parents[1] / "ranks"))  # the pool of ranks


@pytest.fixture(autouse=True, scope="module")
def without_figures() -> Iterator[ModuleType]:
    """Runs draw none, as without matplotlib: figures take longer than all else in a short run."""
    with pytest.MonkeyPatch.context() as patch:
        real = importlib.import_module("matplotlib")
        patch.setitem(sys.modules, "matplotlib", None)
        yield real


@pytest.fixture
def figures(without_figures: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of this test draw them after all."""
    monkeypatch.setitem(sys.modules, "matplotlib", without_figures)
