"""Floors are measured for a moment: their size is looked at, not their precision."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zeroblock.bench import ceiling


@pytest.fixture(autouse=True, scope="module")
def short_measurements() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceiling, "MIN_MEASURED_MS", 2.0)
        yield
