"""The pool of ranks that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    with Pool(4, preload=["rank_warm", "shard_case", "torch._dynamo"]) as pool:
        yield pool
