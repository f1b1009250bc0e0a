"""Ranks that share data or probes take the steps of one process, to the bit."""

from __future__ import annotations

import pytest
import rank_case
import torch
from pool import Pool
from rank_case import Outcome

from toy import same
from zeroblock.method import METHODS

every_method = pytest.mark.parametrize("name", METHODS)


def equal(a: Outcome, b: Outcome) -> bool:
    return a[1] == b[1] and same(a[0], b[0])


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_equal_one_process(pool: Pool, name: str, dtype: torch.dtype) -> None:
    """Data on 2 and 4 ranks is a list of as many micro-batches; probes on 1, 2 and 4 ranks are the same probes."""
    for outcomes in pool.run(rank_case.by_data, name, dtype, (2, 4)):
        for size, outcome in outcomes.items():
            assert equal(outcome, rank_case.alone(name, dtype, size)), (name, size)
    one = rank_case.alone(name, dtype, 1, probes=4)
    assert one[1][0].coeffs != one[1][1].coeffs
    for outcomes in pool.run(rank_case.by_probes, name, dtype, (1, 2, 4)):
        for size, outcome in outcomes.items():
            assert equal(outcome, one), (name, size)
