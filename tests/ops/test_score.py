"""Log-probabilities and losses: the kernels against plain torch, and plain torch against words."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from zeroblock.engine.pack import Padded, Row, pack, pad
from zeroblock.ops import score
from zeroblock.ops.score import Loss, reference
from zeroblock.task.encoding import Encoded

kernel = pytest.importorskip("zeroblock.ops.score.triton")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, where numbers are not finite

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RELATIVE = 2e-6
"""Tolerance, relative to the largest logit of about 10: sums are in another order, and norms have 24 bits."""
BATCHES = {
    "one option": [Encoded((1, 2), ((3, 4, 5),))],
    "one example": [Encoded((1, 2, 3), ((4,), (5,)))],
    "single tokens": [Encoded((1, 2), ((3,), (4,))), Encoded((1,), ((4,), (3,))), Encoded((5,), ((0,), (1,)))],
    "unequal": [
        Encoded((1, 2), ((3,), (4, 5, 6, 7), (4, 5, 1))),
        Encoded((2,), ((6, 6), (0,))),
        Encoded((5, 1), ((1, 2, 3),)),
    ],
    "many options": [Encoded((1,), tuple((i % 7, i // 7) for i in range(37))), Encoded((1,), ((3,), (4,)))],
    "many examples": [Encoded((1, i % 5), ((i % 7,), (1, 2))) for i in range(35)],
    "long option": [Encoded((1,), (tuple(i % 7 for i in range(150)), (3, 2)))],
}


def row_of(name: str, padded: bool = False) -> tuple[Row | Padded, Tensor]:
    """A row, and an answer for each of its examples."""
    batch = BATCHES[name]
    row = pad(batch) if padded else pack(batch, multiple=8, scored=16)
    labels = torch.tensor([i % len(one.options) for i, one in enumerate(batch)])
    return row.to(torch.device(DEVICE)), labels.to(DEVICE)


def logits_of(row: Row | Padded, rows: int, words: int, dtype: torch.dtype = torch.float32) -> Tensor:
    places = row.tokens.numel() if isinstance(row, Padded) else len(row.keep)
    generator = torch.Generator().manual_seed(words)
    return (3 * torch.randn(rows, places, words, generator=generator)).to(DEVICE, dtype)


def check_totals(logits: Tensor, row: Row | Padded) -> None:
    got, expected = kernel.totals(logits, row), reference.totals(logits, row)
    assert got.dtype == torch.float32
    longest = int(row.lengths.max())
    torch.testing.assert_close(got, expected, rtol=RELATIVE, atol=10 * RELATIVE * longest, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("name", BATCHES)
def test_totals(name: str, rows: int, dtype: torch.dtype) -> None:
    if DEVICE == "cpu" and rows * len(BATCHES[name]) > 70:
        pytest.skip("the interpreter is slow; many rows and many examples are covered by themselves")
    row, _ = row_of(name)
    check_totals(logits_of(row, rows, 11, dtype), row)


@pytest.mark.parametrize("words", [8, 64, kernel.WORDS - 1, kernel.WORDS, kernel.WORDS + 1, 3 * kernel.WORDS + 17])
def test_vocabularies_of_any_size(words: int) -> None:
    row, _ = row_of("unequal")
    check_totals(logits_of(row, 2, words, torch.float16), row)


def test_padded_rows() -> None:
    row, _ = row_of("unequal", padded=True)
    check_totals(logits_of(row, 1, 11), row)


def test_strided_logits() -> None:
    row, _ = row_of("unequal")
    logits = logits_of(row, 1, 32)
    for strange in (
        logits.expand(3, -1, -1),
        logits[:, :, ::2],
        logits_of(row, 3, 32)[::2],
        logits.transpose(1, 2).contiguous().transpose(1, 2),
    ):
        check_totals(strange, row)


def test_totals_are_more_exact_than_norms_in_fp32() -> None:
    row, _ = row_of("unequal")
    logits = logits_of(row, 9, 500) + 60
    exact = logits.double().log_softmax(-1)[:, row.source, row.target]
    exact = torch.cat([exact, exact.new_zeros(9, 1)], 1)[:, row.spans].sum(-1)
    error, usual = ((version.totals(logits, row) - exact).abs().max() for version in (kernel, reference))
    assert error <= usual
    assert error < 5e-6  # totals of -40 have 24 bits, too


@pytest.mark.parametrize("dtype", DTYPES)
def test_totals_of_what_is_not_finite(dtype: torch.dtype) -> None:
    row, _ = row_of("unequal")
    words = kernel.WORDS + 5
    whole = logits_of(row, 1, words, dtype)
    plain = kernel.totals(whole, row)
    for place in (0, 3, kernel.WORDS + 1):  # a word that is scored, one that may be, and one of the last piece
        for value in (math.nan, math.inf, -math.inf):
            logits = whole.clone()
            logits[:, int(row.source[0]), place] = value
            check_totals(logits, row)
            got = kernel.totals(logits, row)
            if math.isnan(value):
                assert got[0, 0].isnan()
            assert torch.equal(got[0, 3:], plain[0, 3:])  # other examples keep their numbers
    for value in (math.nan, math.inf, -math.inf):
        check_totals(torch.full_like(whole, value), row)
    halved = whole.clone()
    halved[:, :, : kernel.WORDS] = -math.inf  # a whole piece
    check_totals(halved, row)


def test_a_token_outside_the_vocabulary_is_noticed() -> None:
    row, _ = row_of("one example")
    row.target[0] = 11
    assert kernel.totals(logits_of(row, 1, 11), row).isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("name", BATCHES)
def test_losses(name: str, rows: int, loss: Loss) -> None:
    row, labels = row_of(name)
    generator = torch.Generator().manual_seed(rows)
    totals = (-5 * torch.rand(rows, len(row.lengths), generator=generator)).to(DEVICE)
    got, expected = kernel.losses(totals, row, labels, loss), reference.losses(totals, row, labels, loss)
    assert got.shape == expected.shape == (rows,)
    torch.testing.assert_close(got, expected, rtol=RELATIVE, atol=RELATIVE * len(labels))


@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("name", ["one option", "unequal", "many options"])
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_losses_of_what_is_not_finite(value: float, name: str, loss: Loss) -> None:
    row, labels = row_of(name)
    totals = -torch.ones(len(row.lengths) + 1, len(row.lengths), device=DEVICE)
    totals.fill_diagonal_(value)
    totals[-1] = value
    got, expected = kernel.losses(totals, row, labels, loss), reference.losses(totals, row, labels, loss)
    torch.testing.assert_close(got, expected, rtol=RELATIVE, atol=RELATIVE, equal_nan=True)
    if math.isnan(value) and loss is not Loss.ANSWER:
        assert got.isnan().all()


def test_equal_options_stay_equal() -> None:
    """Options of the same logits tie to the bit, wherever they stand, so that the first of them is chosen."""
    batch = [Encoded((1,), ((3, 4), (5, 6))), Encoded((1,), ((3, 4), (5, 6)))]
    row = pack(batch, scored=16).to(torch.device(DEVICE))
    logits = logits_of(row, 1, 11)[:, :1].expand(-1, len(row.keep), -1).clone()
    logits[:, :, 5], logits[:, :, 6] = logits[:, :, 3], logits[:, :, 4]
    assert len(set(kernel.totals(logits, row)[0].tolist())) == 1


def test_a_loss_in_words() -> None:
    """Three words, two examples: log-probabilities that a reader can check."""
    row = pack([Encoded((0,), ((1,), (2,))), Encoded((0,), ((2, 2), (1,)))]).to(torch.device(DEVICE))
    logits = torch.tensor([0.2, 0.3, 0.5], device=DEVICE).log().expand(1, len(row.keep), -1)
    labels = torch.tensor([1, 0], device=DEVICE)
    a, b = math.log(0.3), math.log(0.5)
    right = math.log(0.5 / 0.8)  # the mean of two equal tokens is that of one
    for version in (reference, kernel):
        totals = version.totals(logits, row)
        assert totals.tolist()[0] == pytest.approx([a, b, 2 * b, a], rel=1e-6)
        found = [float(version.losses(totals, row, labels, loss)) for loss in Loss]
        assert found == pytest.approx([-2 * right, -2 * b, -2 * a - 3 * b], rel=1e-6)


def test_gradients_flow_through_plain_torch() -> None:
    row, labels = row_of("unequal")
    logits = logits_of(row, 1, 11).requires_grad_()
    score.losses(score.totals(logits, row), row, labels, Loss.OPTIONS).sum().backward()
    assert logits.grad is not None
    assert bool(logits.grad.abs().sum() > 0)


def test_the_cpu_takes_plain_torch() -> None:
    row, labels = row_of("unequal")
    if DEVICE == "cuda":
        row, labels = row.to(torch.device("cpu")), labels.cpu()
    logits = torch.randn(2, len(row.keep), 11)  # type: ignore[union-attr]
    totals = score.totals(logits, row)
    assert torch.equal(totals, reference.totals(logits, row))
    assert torch.equal(
        score.losses(totals, row, labels, Loss.OPTIONS), reference.losses(totals, row, labels, Loss.OPTIONS)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("words", [50257, 50272, 262144])
def test_large_vocabularies_on_the_gpu(words: int, dtype: torch.dtype) -> None:
    row, labels = row_of("unequal")
    logits = logits_of(row, 2, words, dtype)
    with torch.no_grad():
        totals = score.totals(logits, row)
        torch.testing.assert_close(totals, reference.totals(logits, row), rtol=1e-5, atol=1e-4)
        assert torch.equal(totals, score.totals(logits, row))
        if dtype != torch.float64:
            assert torch.equal(totals, kernel.totals(logits, row))
        for loss in Loss:
            got, expected = (version.losses(totals, row, labels, loss) for version in (score, reference))
            torch.testing.assert_close(got, expected, rtol=RELATIVE, atol=RELATIVE)


@pytest.mark.gpu
def test_one_row_compiles_the_kernels_of_all() -> None:
    """Rows of other shapes, in buffers of any alignment, find the kernels compiled: they may be met in a capture."""
    row, labels = row_of("unequal")
    totals = kernel.totals(logits_of(row, 2, 50272, torch.float16), row)
    kernel.losses(totals, row, labels, Loss.OPTIONS)
    device = torch.cuda.current_device()
    counts = [len(one.device_caches[device][0]) for one in (kernel._norms, kernel._totals, kernel._losses)]
    for name in BATCHES:
        other, labels = row_of(name)
        assert isinstance(other, Row)
        flat = other.flat()
        moved = other.view(torch.cat([flat[:1], flat])[1:])
        for rows in (1, 2, 9):
            totals = kernel.totals(logits_of(moved, rows, 50272, torch.float16), moved)
            kernel.losses(totals, moved, torch.cat([labels[:1], labels])[1:], Loss.OPTIONS)
    after = [len(one.device_caches[device][0]) for one in (kernel._norms, kernel._totals, kernel._losses)]
    assert after == counts
