"""Tokenised batches on packed rows: the same loss as the model's own, wherever its labels are."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from decoder import decoder
from torch import Tensor

import zeroblock as zb
from zeroblock.engine.bridge import BridgeError, rescored, texts
from zeroblock.engine.pack import pack

Batch = dict[str, Tensor]
SCORED = [range(1, 12), range(3, 7), (2, 3, 6, 8), (4,)]  # all, one answer, several turns, one token; of each row
LENGTHS = (12, 7, 9, 5)


def batch(side: str = "right", rows: slice = slice(None)) -> Batch:
    generator = torch.Generator().manual_seed(0)
    shape = len(LENGTHS), max(LENGTHS)
    ids, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, -100)
    for row, (length, scored) in enumerate(zip(LENGTHS, SCORED, strict=True)):
        first = shape[1] - length if side == "left" else 0
        ids[row, first : first + length] = torch.randint(3, 60, (length,), generator=generator)
        for place in scored:
            labels[row, first + place] = ids[row, first + place]
    whole = {"input_ids": ids, "labels": labels, "attention_mask": (ids != 0).long()}
    return {name: value[rows] for name, value in whole.items()}


def plain(model: Any, batch: Batch, **options: Any) -> float:
    with torch.no_grad():
        return float(model(**batch, **options).loss)


def summed(model: Any, parts: list[Batch], scored: int) -> float:
    """The loss of micro-batches as the Trainer sums it."""
    return sum(plain(model, part, num_items_in_batch=scored) for part in parts)


@pytest.fixture(scope="module")
def llama() -> zb.Engine:
    return zb.Engine(decoder("llama"))


@pytest.mark.parametrize("name", ["llama", "opt", "gpt2", "gemma2"])
def test_the_loss_is_the_models_own(name: str) -> None:
    engine = zb.Engine(decoder(name))
    sides = ["right"] if name == "gpt2" else ["right", "left"]
    for side in sides:
        given = batch(side)
        objective = engine.objective_from(given)
        assert objective.weight == ("tokens", sum(map(len, SCORED)))
        with torch.no_grad():
            assert float(objective()) == pytest.approx(plain(engine.model, given), abs=1e-5)
    if name == "gpt2":
        with pytest.raises(BridgeError, match=r"GPT2LMHeadModel counts padding .*padding_side = 'right'"):
            engine.objective_from(batch("left"))


def test_rows_that_are_split_padded_or_rounded_up_score_the_same(llama: zb.Engine) -> None:
    given = batch("left")
    expected = plain(llama.model, given)
    split = zb.Engine(llama.model, max_tokens=14)
    padded = zb.Engine(llama.model)
    padded.packed = padded.forked = False
    for engine, count in ((split, 3), (padded, 1)):
        objective = engine.objective_from(given)
        assert len(objective.rows) == count
        with torch.no_grad():
            assert float(objective()) == pytest.approx(expected, abs=1e-5)
    some, _ = texts(given)
    row = rescored(pack([text.example for text in some], 16, 16), some, 32)
    assert (row.keep.shape, row.spans.shape, int(row.lengths)) == ((32,), (1, 32), sum(map(len, SCORED)))
    with torch.no_grad():
        total = float(llama.totals(row)[0, 0])
    assert -total / int(row.lengths) == pytest.approx(expected, abs=1e-5)


def test_a_step_moves_the_weights_as_the_plain_closure_does_over_micro_batches() -> None:
    halves = [batch(rows=slice(0, 2)), batch(rows=slice(2, 4))]
    scored = sum(map(len, SCORED))
    ends = []
    for packed in (True, False):
        model = decoder("llama")
        optimizer, engine = zb.mezo_bcd(model, lr=1e-3), zb.Engine(model)
        for _ in range(3):
            if packed:
                loss = optimizer.step([engine.objective_from(half) for half in halves])
            else:
                loss = optimizer.step(functools.partial(summed, model, halves, scored))
        ends.append((float(loss), model))
    (one, first), (other, second) = ends
    assert one == pytest.approx(other, abs=1e-5)
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


def changed(key: str, value: object) -> dict[str, object]:
    return {**batch(), key: value}


def marked(key: str, row: int, place: int, value: int, side: str = "right") -> Batch:
    given = batch(side)
    given[key][row, place] = value
    return given


def test_a_token_beyond_the_mask_is_scored_where_a_real_one_predicts_it(llama: zb.Engine) -> None:
    """An end-of-text token that is also the padding token: hidden as input, wanted as output."""
    given = marked("labels", 3, LENGTHS[3], 2)
    with torch.no_grad():
        assert float(llama.objective_from(given)()) == pytest.approx(plain(llama.model, given), abs=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (changed("position_ids", torch.zeros(4, 12)), r"has position_ids.*packing=False"),
        (changed("pixel_values", torch.zeros(4)), "the batch has pixel_values; the engine takes"),
        (changed("labels", None), "the batch has no labels"),
        (changed("labels", torch.zeros(4, 3)), r"must all be \(rows, tokens\)"),
        (changed("labels", torch.full((4, 12), -100)), "no token of the batch is scored"),
        (marked("labels", 0, 3, -1), "labels are token ids, or -100"),
        (marked("attention_mask", 0, 5, 0), "row 0: attention_mask hides tokens between others"),
        (marked("labels", 1, 5, 9, "left"), r"row 1 scores its first token.*padding_side = 'right'"),
        (marked("labels", 3, 11, 9), "row 3 scores padding"),
    ],
)
def test_a_batch_that_rows_cannot_hold_is_refused_with_the_fix(
    llama: zb.Engine, given: dict[str, object], message: str
) -> None:
    with pytest.raises(BridgeError, match=message):
        llama.objective_from(given)
