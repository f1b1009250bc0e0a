"""Options of which only some tokens carry loss, against transformers' own loss with labels of -100."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from decoder import decoder

import zeroblock as zb
from zeroblock.engine import Engine
from zeroblock.engine.pack import pad
from zeroblock.errors import ZeroBlockError
from zeroblock.task import Encoded

MARKS = ((True, True, False, False, True, False), (False, True), (True,), (False, False, True, True))
BATCH = [
    Encoded(tuple(range(3, 6 + row)), (tuple(range(20 + row, 20 + row + len(marks))),), scored=(marks,))
    for row, marks in enumerate(MARKS)
]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return decoder("llama")


def labelled(batch: list[Encoded]) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded ids, and the same as labels with -100 wherever a token carries no loss."""
    width = max(len(one.rows[0][0]) for one in batch)
    ids, labels = torch.zeros(len(batch), width, dtype=torch.long), torch.full((len(batch), width), -100)
    for row, one in enumerate(batch):
        string = torch.tensor(one.rows[0][0])
        ids[row, : len(string)] = string
        marks = torch.tensor((False,) * len(one.context) + one.marks[0])
        labels[row, : len(string)] = torch.where(marks, string, -100)
    return ids, labels


def hugging_face(model: torch.nn.Module, batch: list[Encoded]) -> float:
    ids, labels = labelled(batch)
    with torch.no_grad():
        return float(model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss)


@pytest.mark.parametrize("max_tokens", [None, 12])
def test_the_loss_is_that_of_labels_with_minus_100(model: torch.nn.Module, max_tokens: int | None) -> None:
    engine = Engine(model, max_tokens=max_tokens)
    with torch.no_grad():
        by_token = float(engine.objective(BATCH, [0] * 4, "answer")())
        by_example = float(engine.objective(BATCH, [0] * 4, "answer", "examples")())
    assert by_token == pytest.approx(hugging_face(model, BATCH), abs=1e-5)
    assert by_example == pytest.approx(sum(hugging_face(model, [one]) for one in BATCH) / 4, abs=1e-5)
    assert abs(by_token - by_example) > 1e-3
    assert [score.tokens for (score,) in engine.scores(BATCH)] == [3, 1, 1, 2]


def test_forked_steps_and_padded_rows_agree(model: torch.nn.Module) -> None:
    losses = []
    for fork in (True, False):
        optimizer = zb.mezo_bcd(model, lr=0.0)
        optimizer.step(Engine(model, fork=fork).objective(BATCH, [0] * 4, "answer"))
        losses.append(optimizer.record.losses)
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    padded, engine = pad(BATCH), Engine(model)
    with torch.no_grad():
        totals = engine.totals(padded)[0]
    assert totals.tolist() == pytest.approx([score.total for (score,) in engine.scores(BATCH)], abs=1e-4)


def test_marks_follow_their_option() -> None:
    both = Encoded((1, 2), ((3, 4), (5, 6, 7)), cut=1, scored=((True, False), (False, True, True)))
    assert both.only(1) == Encoded((1, 2), ((5, 6, 7),), 1, ((False, True, True),))
    assert dataclasses.replace(both, scored=None).marks == ((True, True), (True, True, True))
    with pytest.raises(ZeroBlockError, match="one mark per token"):
        dataclasses.replace(both, scored=((True,), (True,)))
    with pytest.raises(ZeroBlockError, match="no scored token"):
        dataclasses.replace(both, scored=((True, False), (False, False, False)))
