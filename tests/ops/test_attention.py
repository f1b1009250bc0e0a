"""The packed attention kernel against the plain one under the row's mask."""

from __future__ import annotations

import pytest
import torch

from zeroblock.engine.pack import pack
from zeroblock.ops.attention.reference import dense
from zeroblock.task import Encoded

triton = pytest.importorskip("zeroblock.ops.attention.triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16]
if DEVICE == "cuda":  # Triton's interpreter has no product of bf16
    DTYPES.append(torch.bfloat16)


def _row(lengths: list[tuple[int, tuple[int, ...]]], multiple: int, root: int = 0):
    """A row of examples with contexts and options of these lengths; all contexts begin with ``root`` tokens."""
    batch = []
    for number, (context, options) in enumerate(lengths):
        tokens = (*range(root), *range(1000 * (number + 1), 1000 * (number + 1) + context))
        written = tuple(tuple(range(40 + k, 40 + k + n)) for k, n in enumerate(options))
        batch.append(Encoded(tokens, written) if options else Encoded(tokens, ((40,),), mask=0))
    row = pack(batch, multiple)
    assert int(row.root) == root
    return row.to(torch.device(DEVICE))


SHAPES = {
    "one token": ([(1, (1,))], 1),
    "short": ([(5, (2, 3)), (1, (1, 1, 4)), (9, (6,))], 1),
    "padded": ([(7, (1, 1)), (3, (4, 2))], 16),
    "masked": ([(9, ()), (5, (2, 3)), (36, ())], 16),  # examples that look both ways, beside one that does not
    "long": ([(70, (3, 5)), (41, (2,)), (90, (1, 9, 3))], 8),
    "root": ([(5, (2, 3)), (0, (1, 1, 4)), (9, (6,))], 16, 3),
    "long root": ([(70, (3, 5)), (4, (2,)), (20, (1, 9, 3))], 8, 67),  # longer than a tile
}


LONG = ((2, None, None), (4, 4, None), (3, None, 2.0))


@pytest.mark.parametrize(("narrow", "wide"), [(16, 24), (24, 16)])
def test_values_may_be_of_another_width(narrow: int, wide: int) -> None:
    row = _row(*SHAPES["short"])
    generator = torch.Generator().manual_seed(0)
    shape = (2, 2, len(row.tokens))
    query, key = (torch.randn(*shape, narrow, generator=generator).to(DEVICE) for _ in range(2))
    value = torch.randn(*shape, wide, generator=generator).to(DEVICE)
    expected = dense(query, key, value, row.sees(), 0.3, None).transpose(1, 2)
    torch.testing.assert_close(triton.packed(query, key, value, row, 0.3, None, None), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("heads", "groups", "size"), [(2, 1, 16), (4, 2, 24), (3, 3, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (None, 2.0)])
def test_the_kernel_sees_what_the_mask_says(shape, heads, groups, size, dtype, window, softcap) -> None:
    if shape in ("long", "long root", "masked") and DEVICE == "cpu" and (heads, window, softcap) not in LONG:
        pytest.skip("the interpreter is slow; long rows meet every kind of head and of mask, short ones all pairs")
    row = _row(*SHAPES[shape])
    length = len(row.tokens)
    generator = torch.Generator().manual_seed(0)
    draw = lambda h: torch.randn(2, length, h, size, generator=generator).to(DEVICE, dtype).transpose(1, 2)  # noqa: E731
    q, k, v = draw(heads), draw(heads // groups), draw(heads // groups)
    out = triton.packed(q, k, v, row, 0.3, window, softcap)
    wide = [x.float() for x in (q, k, v)]
    expected = dense(*wide, row.sees(window), 0.3, softcap).transpose(1, 2)
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
    assert out.is_contiguous()
