"""The pool of ranks that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    with Pool(4, preload=["rank_warm"]) as pool:
        yield pool


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--dist loadgroup`` one worker runs all of these tests, so that there is one pool."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.path.parent.name == "ranks":
                item.add_marker(pytest.mark.xdist_group("ranks"))
