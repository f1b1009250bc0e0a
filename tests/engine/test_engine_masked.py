"""Masked language models: packed against one by one, forked against sequential, and what is not packed says so."""

from __future__ import annotations

import pytest
import torch
import transformers

import zeroblock as zb
from masked_toy import BATCH, LABELS, masked
from zeroblock.engine import Engine, attention
from zeroblock.engine.bridge import BridgeError
from zeroblock.engine.pack import pad
from zeroblock.errors import ZeroBlockError, ZeroBlockWarning
from zeroblock.task import Encoded

KINDS = {
    "Bert": {},
    "Roberta": {},
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "ModernBert": {"local_attention": 4, "layer_types": ["sliding_attention", "full_attention"], "bos_token_id": 2}
    | {"cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3},
}


@torch.no_grad()
def alone(model: torch.nn.Module) -> list[float]:
    """The log-probability of each option: a batch of one, unpadded."""
    found = []
    for one in BATCH:
        scores = model(input_ids=torch.tensor([one.context])).logits[0, one.mask].log_softmax(-1)
        found += [float(scores[token]) for (token,) in one.options]
    return found


def scores(engine: Engine) -> list[float]:
    return [score.total for scores in engine.scores(BATCH) for score in scores]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_and_padded_scores_are_those_of_each_text_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = masked(kind, **KINDS[kind])
    expected = alone(model)
    for max_tokens in (None, 6):
        engine = Engine(model, max_tokens=max_tokens)
        assert engine.forked, engine.reason
        assert engine.max_length > max(len(one.context) for one in BATCH)
        assert scores(engine) == pytest.approx(expected, abs=1e-5)
    assert engine.totals(pad(BATCH))[0].tolist() == pytest.approx(expected, abs=1e-5)
    monkeypatch.setattr(attention, "DENSE_TOKENS", 4)  # rows that are run a few queries at a time
    assert scores(Engine(model)) == pytest.approx(expected, abs=1e-5)
    right = [expected[0], expected[4], expected[5]]
    with torch.no_grad():
        loss = float(engine.objective(BATCH, LABELS, "answer")())
    assert loss == pytest.approx(-sum(right) / 3, abs=1e-5)


@pytest.mark.parametrize(("kind", "method"), [("Bert", "mezo_bcd"), ("Roberta", "mezo_bcd"), ("Roberta", "lozo")])
def test_forked_is_sequential_on_every_block(kind: str, method: str) -> None:
    model = masked(kind)
    engine = Engine(model)
    objective = engine.objective(BATCH, LABELS)
    records: list[list[zb.Record]] = []
    for closure in (objective, lambda: objective()):
        optimizer = zb.METHODS[method](model, lr=0.0, eps=1e-2, seed=3)
        records.append([])
        optimizer.listener = records[-1].append
        for _ in optimizer.blocks:
            optimizer.step(closure)
    assert engine.forked, engine.reason
    assert {record.block for record in records[0]} == set(range(len(optimizer.blocks)))
    for one, other in zip(*records, strict=True):
        assert one.losses[0] != one.losses[1]
        assert one.losses == pytest.approx(other.losses, abs=1e-5)


def test_a_model_that_cannot_be_packed_says_so_and_scores_the_same() -> None:
    model = masked("DebertaV2")
    with pytest.warns(ZeroBlockWarning, match="DebertaV2ForMaskedLM is evaluated on padded rows"):
        engine = Engine(model)
    assert scores(engine) == pytest.approx(alone(model), abs=1e-5)


def test_examples_are_those_of_the_model() -> None:
    engine = Engine(masked("Bert"))
    with pytest.raises(ZeroBlockError, match=r"BertForMaskedLM fills in masks, .* masked=True"):
        engine.scores([Encoded((3, 4), ((5,), (6,)))])
    with pytest.raises(BridgeError, match="at its own place"):
        engine.objective_from({"input_ids": torch.ones(1, 4), "labels": torch.ones(1, 4)})
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    decoder = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **shape))
    with pytest.raises(ZeroBlockError, match=r"LlamaForCausalLM continues a text, .* masked=False"):
        Engine(decoder).scores(BATCH)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": ((4, 5),), "mask": 0}, "a mask stands for one token"),
        ({"options": ((4,),), "mask": 0, "scored": ((True,),)}, "a mask stands for one token"),
        ({"options": ((4,),), "mask": 2}, "mask is place 2 of a context of 2 tokens"),
    ],
)
def test_a_mask_is_checked(fields, message) -> None:
    with pytest.raises(ZeroBlockError, match=message):
        Encoded((1, 2), **fields)
