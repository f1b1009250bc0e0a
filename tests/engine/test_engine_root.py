"""Examples that begin alike: the row holds their common tokens once, and every loss is that of the texts alone."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from decoder import CONFIGS, LABELS, decoder
from test_engine_equality import both_ways, slow_loss, slow_scores

import zeroblock as zb
from zeroblock.engine import Engine
from zeroblock.engine.attention import DENSE_TOKENS
from zeroblock.engine.pack import Padded, Row, lay, pack, root
from zeroblock.ops.attention import Packed
from zeroblock.run.graph import Graphs
from zeroblock.task import Encoded

HEAD = (1, 30, 31, 32, 33)
BATCH = [
    Encoded((*HEAD, 5, 6, 7, 11, 12), ((8, 9), (8, 7, 5))),  # options that begin alike
    Encoded(HEAD, ((4,), (5,), (6,))),  # nothing but the root
    Encoded((*HEAD, 9, 13, 14, 15, 16, 17), ((3, 4, 8, 5), (2, 2))),  # options of several tokens
    Encoded((*HEAD, 22), ((23,),)),
]


def totals(model, batch: list[Encoded], **options) -> list[float]:
    """The log-probability of every option, from the engine."""
    return [score.total for scores in Engine(model, **options).scores(batch) for score in scores]


def texts(row) -> list[list[int]]:
    """What every token of a row sees, itself included, in the order of positions."""
    seen, positions = row.sees(), row.positions
    return [row.tokens[mask][positions[mask].argsort()].tolist() for mask in seen]


def test_a_row_holds_the_root_once_and_every_token_sees_its_own_text() -> None:
    row = pack(BATCH)
    assert int(row.root) == root(BATCH) == len(HEAD)
    assert row.tokens.tolist() == [
        *HEAD, 5, 6, 7, 11, 12, 8, 7,  # the last tokens of options are only predicted
        9, 13, 14, 15, 16, 17, 3, 4, 8, 2, 22,
    ]  # fmt: skip
    found = texts(row)
    assert found[4] == list(HEAD)
    assert found[10] == [*HEAD, 5, 6, 7, 11, 12, 8]
    assert found[20] == [*HEAD, 9, 13, 14, 15, 16, 17, 3, 4, 8]
    assert found[21] == [*HEAD, 9, 13, 14, 15, 16, 17, 2]
    assert found[22] == [*HEAD, 22]
    assert sorted(map(tuple, found)) == sorted({tuple(text) for text in found})  # no text is computed twice
    assert row.keep.tolist().count(4) == 1  # the root predicts the options of the second example


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (BATCH[:1], 0),  # one example shares with nobody
        ([BATCH[1], BATCH[1], BATCH[1]], len(HEAD)),  # the same text three times
        ([BATCH[0], Encoded((9, 5), ((4,),))], 0),
        ([BATCH[0], Encoded((1, 30, 7), ((4,),))], 2),
        ([Encoded((1, 2, 3), ((40,),), mask=1), Encoded((1, 2, 4), ((40,),), mask=1)], 0),  # they look both ways
        ([Encoded((1, 2, 3), ((4,),), seq2seq=True), Encoded((1, 2, 5), ((4,),), seq2seq=True)], 0),
    ],
)
def test_the_root_is_what_all_contexts_begin_with(batch: list[Encoded], expected: int) -> None:
    assert root(batch) == expected
    row = pack(batch)
    assert len(row.keep) == len({tuple(texts(row)[place]) for place in row.keep.tolist()})


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_are_those_of_each_string_alone(name: str) -> None:
    model = decoder(name)
    slow = slow_scores(model, BATCH)
    for max_tokens in (None, 14, 1):
        engine = Engine(model, max_tokens=max_tokens)
        assert engine.forked, engine.reason
        expected = [x for row in slow for x in row]
        torch.testing.assert_close(totals(model, BATCH, max_tokens=max_tokens), expected, rtol=1e-4, atol=1e-4)
        for over in ("options", "answer"):
            loss = float(engine.objective(BATCH, LABELS, over)())
            assert loss == pytest.approx(slow_loss(slow, BATCH, LABELS, over, "tokens"), abs=2e-5)


@pytest.mark.parametrize("method", ["mezo_bcd", "mezo", "lozo"])
@pytest.mark.parametrize("name", ["opt", "gemma3", "gpt2", "mixtral"])
def test_forked_is_sequential_on_every_block(name: str, method: str) -> None:
    model = decoder(name)
    build = functools.partial(zb.METHODS[method], lr=0.0, eps=1e-2, seed=3)
    (forked, _), (sequential, _) = both_ways(model, build, len(build(model).blocks), batch=BATCH)
    for one, other in zip(forked, sequential, strict=True):
        assert one.losses[0] != one.losses[1]
        assert one.losses == pytest.approx(other.losses, abs=3e-6)


@pytest.mark.parametrize("name", ["llama", "mistral"])  # mistral's window is shorter than the root
def test_long_rows_see_the_root_too(name: str) -> None:
    head, tail = tuple(range(3, 12)), tuple(range(12, 40))
    batch = [Encoded((*head, 40 + i % 8, *tail[: i % 28]), ((3, 4, 5), (6, 7))) for i in range(60)]
    assert len(pack(batch).tokens) > DENSE_TOKENS
    model = decoder(name)
    expected = [x for row in slow_scores(model, batch) for x in row]
    torch.testing.assert_close(totals(model, batch), expected, rtol=1e-4, atol=1e-4)


def test_tokens_that_the_root_predicts_are_scored_in_every_text() -> None:
    """Labels on all tokens of padded rows that begin alike, as in pre-training, against the model's own loss."""
    model = decoder("llama")
    ids = torch.tensor([[1, 30, 31, 5, 6, 0], [1, 30, 31, 7, 0, 0], [1, 30, 31, 5, 9, 11]])
    mask = (ids != 0).long()
    labels = ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    objective = Engine(model).objective_from(batch)
    ((row, _),) = objective.rows
    assert int(row.root) == 3
    assert len(row.tokens) == 6  # 1 30 31, 5, 5 9: the last tokens are only predicted
    with torch.no_grad():
        assert float(objective()) == pytest.approx(float(model(**batch).loss), abs=2e-6)


def test_layers_find_what_they_read_in_every_row_of_a_length() -> None:
    """Captured layers are shared by all rows of S tokens; the rows may score other options, answers or numbers."""
    model = decoder("llama")
    engine = Engine(model)
    engine.graphs, engine.coarse = Graphs(), True  # as on a GPU
    contexts = [(*HEAD, 9 + k, 13) for k in range(3)]
    questions = [((8, 9), (7, 5)), ((8, 9, 4), (7, 5), (6,)), ((8,), (7,)), ((4, 5, 6, 7, 8, 9),) * 2]
    objectives = [engine.objective([Encoded(one, some) for one in contexts], [0, 1, 0]) for some in questions]
    ids = torch.tensor([[*one, 3, 4] for one in contexts])
    objectives.append(engine.objective_from({"input_ids": ids, "labels": ids}))
    objectives.append(engine.objective([Encoded((2, *one), ((8,),)) for one in contexts[::-1]], [0, 0, 0]))
    read = ["tokens", *(name for name in vars(Packed) if isinstance(vars(Packed)[name], property))]
    assert "root" in read
    buffer = torch.zeros(1 << 12, dtype=torch.long)
    captured: Row | None = None
    for objective in objectives:
        staged = objective.stage()
        assert staged is not None
        assert staged.row == (128,)
        buffer.random_(1000)  # what earlier rows left
        buffer[: len(staged.batch)] = staged.batch
        bound = staged.bind(buffer[: len(staged.batch)])
        ((row, labels),) = bound.rows
        captured = captured or row
        fields = {name: getattr(captured, name) for name in read}  # where the first row's layers read
        replayed = dataclasses.replace(bound, rows=[(dataclasses.replace(row, **fields), labels)])
        with torch.no_grad():
            assert float(replayed()) == float(objective())


@pytest.mark.parametrize("limit", [1, 5, 8, 13, 20, 1000])
@pytest.mark.parametrize("labels", ["options", "all"])
def test_rows_have_at_most_max_tokens(labels: str, limit: int) -> None:
    """Counted with their root; as many examples share a row as fit, and no logits are computed twice."""
    engine = Engine(decoder("llama"), max_tokens=limit)
    batch = [Encoded((*HEAD, *range(6, 6 + n)), ((3,),)) for n in (3, 1, 0, 7, 2, 2, 4, 0, 0, 1)]
    if labels == "all":
        ids = torch.zeros(len(batch), 13, dtype=torch.long)
        for i, one in enumerate(batch):
            ids[i, : len(one.context) + 1] = torch.tensor([*one.context, 3])
        objective = engine.objective_from(
            {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100), "attention_mask": (ids != 0).long()}
        )
    else:
        objective = engine.objective(batch, [0] * len(batch), "answer")
    rows = [row for row, _ in objective.rows]
    sizes: list[int] = []  # tokens after the root
    for tokens in (lay(one).cost - len(HEAD) for one in batch):
        if sizes and len(HEAD) + sizes[-1] + tokens <= limit:
            sizes[-1] += tokens
        else:
            sizes.append(tokens)
    assert [len(row.tokens) - len(HEAD) for row in rows] == sizes
    for row in rows:
        assert isinstance(row, Row)
        assert len(row.keep) == len(set(row.keep.tolist()))


def test_padded_strings_are_counted_with_what_they_begin_with() -> None:
    """Strings that are padded share nothing."""
    engine = Engine(decoder("llama"), max_tokens=40)
    engine.max_length = 12
    batch = [Encoded((*HEAD, 20 + k, *range(6, 14)), ((3,),)) for k in range(6)]
    rows = [row for row, _ in engine.objective(batch, [0] * len(batch), "answer").rows]
    assert all(isinstance(row, Padded) for row in rows)
    assert [len(row.tokens) for row in rows] == [2, 2, 2]  # of 14 tokens each
