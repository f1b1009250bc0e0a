"""Where the parts of a tensor lie in it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from zeroblock.noise import Draw, Key
from zeroblock.shard import Box, box_of, companions, local, whole

PARTS = [
    ((7,), (3,), (4,)),
    ((7, 6), (4, 0), (3, 6)),
    ((7, 6), (0, 2), (7, 3)),
    ((7, 6), (4, 5), (2, 1)),
    ((3, 4, 5), (1, 0, 0), (2, 4, 5)),
    ((3, 4, 5), (1, 2, 0), (2, 2, 5)),
    ((3, 4, 5), (1, 0, 3), (2, 4, 2)),
    ((7, 6), (7, 0), (0, 6)),
]


@pytest.mark.parametrize(("shape", "start", "size"), PARTS, ids=str)
def test_addresses_are_those_of_a_slice(shape: tuple[int, ...], start: tuple[int, ...], size: tuple[int, ...]) -> None:
    box = Box(shape, start, size)
    slices = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
    expected = torch.arange(math.prod(shape)).view(shape)[slices].flatten().tolist()
    runs = Draw(Key(0, 0), box.offset, rows=box.rows).runs(box.numel)
    assert list(itertools.chain.from_iterable(range(a, a + n) for a, n in runs)) == expected
    if len(shape) > 1:
        factor = torch.arange(2 * math.prod(shape[1:])).view(-1, 2)
        assert torch.equal(box.columns(factor), factor.view(*shape[1:], 2)[slices[1:]].reshape(-1, 2))
        assert box.matrix == (size[0], math.prod(size[1:]))


def test_a_tensor_of_one_process_is_whole() -> None:
    param = torch.nn.Parameter(torch.ones(2, 2))
    assert box_of("w", param) is None
    assert local(param) is param
    assert whole(param).data_ptr() == param.data_ptr()
    assert companions(param) == set()
