"""What the loss of a batch is a mean over: all scored tokens, as MeZO's code and Hugging Face have it, or examples."""

from __future__ import annotations

import pytest
import torch
from decoder import decoder

import zeroblock as zb
from zeroblock.engine import Engine, attention
from zeroblock.task import Encoded

LENGTHS = (1, 60, 2, 40)


def completions(lengths: tuple[int, ...] = LENGTHS) -> list[Encoded]:
    ids = torch.Generator().manual_seed(0)

    def some(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 50, (count,), generator=ids).tolist())

    return [Encoded(some(3), (some(length),)) for length in lengths]


def hugging_face(model: torch.nn.Module, batch: list[Encoded]) -> float:
    """The loss that transformers computes itself, on padded rows with labels of -100."""
    width = max(len(one.context) + len(one.options[0]) for one in batch)
    tokens, labels = torch.zeros(len(batch), width, dtype=torch.long), torch.full((len(batch), width), -100)
    for row, one in enumerate(batch):
        ids = torch.tensor(one.context + one.options[0])
        tokens[row, : len(ids)] = ids
        labels[row, len(one.context) : len(ids)] = torch.tensor(one.options[0])
    mask = (torch.arange(width) < (tokens != 0).sum(1, keepdim=True)).long()
    with torch.no_grad():
        return float(model(input_ids=tokens, attention_mask=mask, labels=labels).loss)


@pytest.mark.parametrize("max_tokens", [None, 50, 1])
def test_the_mean_over_tokens_is_hugging_faces(max_tokens: int | None) -> None:
    model, batch = decoder("llama"), completions()
    engine = Engine(model, max_tokens=max_tokens)
    by_token = engine.objective(batch, [0] * 4, "answer")
    by_example = engine.objective(batch, [0] * 4, "answer", "examples")
    with torch.no_grad():
        assert float(by_token()) == pytest.approx(hugging_face(model, batch), abs=1e-5)
        each = [hugging_face(model, [one]) for one in batch]
        assert float(by_example()) == pytest.approx(sum(each) / 4, abs=1e-5)
        assert abs(float(by_token()) - float(by_example())) > 1e-3


@pytest.mark.parametrize("reduction", ["tokens", "examples"])
def test_micro_batches_add_up_to_the_batch(reduction: str) -> None:
    """Of unequal numbers of tokens and of examples: sums and counts are added, not means."""
    model, batch = decoder("llama"), completions()
    engine, records = Engine(model), []
    for parts in ([batch], [batch[:1], batch[1:]], [batch[:3], batch[3:]]):
        optimizer = zb.mezo_bcd(model, lr=0.0)
        optimizer.step([engine.objective(part, [0] * len(part), "answer", reduction) for part in parts])
        records.append(optimizer.record)
    for record in records[1:]:
        assert record.losses == pytest.approx(records[0].losses, abs=2e-6)


def test_forked_is_sequential_over_tokens() -> None:
    model, batch = decoder("llama-tied"), completions()
    objective = Engine(model).objective(batch, [0] * 4, "answer")
    records = []
    for closure in (objective, lambda: objective()):
        optimizer = zb.mezo_bcd(model, lr=0.0, eps=1e-2)
        optimizer.step(closure)
        records.append(optimizer.record)
    assert records[0].losses == pytest.approx(records[1].losses, abs=1e-5)


def test_unknown_reductions_are_refused() -> None:
    engine = Engine(decoder("llama"))
    with pytest.raises(zb.ZeroBlockError, match="reduction must be 'tokens' or 'examples', got 'sum'"):
        engine.objective(completions(), [0] * 4, "answer", "sum")


def test_many_options_cost_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one context: scored as they are alone, and attention grows with their number, not with its square."""
    model = decoder("llama")
    example = Encoded(tuple(range(3, 13)), tuple((20 + k % 30, 21 + k % 7, 3 + k % 40) for k in range(400)))
    cells: list[int] = []
    plain = attention.dense

    def counted(query, key, *arguments):
        cells.append(query.shape[2] * key.shape[2])
        return plain(query, key, *arguments)

    monkeypatch.setattr(attention, "dense", counted)
    engine = Engine(model)
    cells.clear()
    together = engine.scores([example])[0]
    layers = model.config.num_hidden_layers
    tokens = 10 + 2 * 400
    assert sum(cells) / layers < tokens * (10 + 2 * attention.DENSE_TOKENS)
    alone = [engine.scores([Encoded(example.context, (option,))])[0][0] for option in example.options[::50]]
    for one, other in zip(together[::50], alone, strict=True):
        assert one.total == pytest.approx(other.total, abs=1e-4)
