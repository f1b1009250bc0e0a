"""Encoder-decoders: shared contexts against one by one, forked against sequential, and what cannot work says so."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
import transformers
from torch import nn

import zeroblock as zb
from seq2seq_toy import BATCH, CONFIGS, LABELS, own_loss, seq2seq
from zeroblock.block import linears
from zeroblock.engine import Engine, fork
from zeroblock.engine.bridge import BridgeError
from zeroblock.engine.pair import pair
from zeroblock.errors import ZeroBlockError, ZeroBlockWarning
from zeroblock.subspace import LowRank
from zeroblock.task import Encoded


def losses(model: nn.Module) -> list[list[float]]:
    """The model's own loss of each option of each example."""
    return [[own_loss(model, one.context, *pair) for pair in zip(one.options, one.marks, strict=True)] for one in BATCH]


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_are_the_models_own(name: str) -> None:
    model = seq2seq(name)
    expected = losses(model)
    for max_tokens in (None, 12):
        engine = Engine(model, max_tokens=max_tokens)
        assert (engine.shares, engine.forked, engine.packed, engine.reason) == (True, True, False, "")
        found = [[-score.mean for score in scores] for scores in engine.scores(BATCH)]
        assert list(chain(*found)) == pytest.approx(list(chain(*expected)), abs=1e-5)
    right = [(own[k], sum(one.marks[k])) for own, one, k in zip(expected, BATCH, LABELS, strict=True)]
    with torch.no_grad():
        over_options = float(engine.objective(BATCH, LABELS)())
        over_tokens = float(engine.objective(BATCH, LABELS, "answer")())
    assert over_tokens == pytest.approx(sum(n * loss for loss, n in right) / sum(n for _, n in right), abs=1e-5)
    logits = [torch.tensor(own).neg().log_softmax(0) for own in expected]
    mean = -sum(float(one[k]) for one, k in zip(logits, LABELS, strict=True)) / len(BATCH)
    assert over_options == pytest.approx(mean, abs=1e-5)


SINGLE = [Encoded((3, 4, 5, 6), ((8, 9), (7,)), seq2seq=True)]
"""One context: a padded row of one string, whose mask has as many rows as a bias of all strings has."""
CASES = [
    *((name, "mezo_bcd", {}) for name in CONFIGS),
    *((name, method, {"interval": 1}) for name in ("t5", "flan-t5", "bart") for method in ("mezo", "lozo")),
    *((name, "mezo_bcd", {"partition": linears}) for name in ("t5", "bart")),
    ("flan-t5", "mezo_bcd", {"probes": 3}),
    ("mt5", "mezo_bcd_adam", {"interval": 1}),
    *((name, "mezo_bcd", {"subspace": LowRank(2), "probes": 2}) for name in ("t5", "umt5", "bart", "led")),
    *((name, "mezo_bcd", {}) for name in ("blenderbot", "longt5", "led", "t5gemma")),
]


@pytest.mark.parametrize(("name", "method", "options"), CASES)
def test_forked_is_sequential_on_every_block(name: str, method: str, options: dict[str, object]) -> None:
    model = seq2seq(name)
    engine = Engine(model)
    for batch, labels in ((BATCH, LABELS), (SINGLE, [0])):
        objective = engine.objective(batch, labels)
        records: list[list[zb.Record]] = []
        for closure in (objective, lambda objective=objective: objective()):
            optimizer = zb.METHODS[method](model, lr=0.0, eps=1e-2, seed=3, **options)
            records.append([])
            optimizer.listener = records[-1].append
            for _ in optimizer.blocks:
                optimizer.step(closure)
        assert engine.forked, engine.reason
        assert {record.block for record in records[0]} == set(range(len(optimizer.blocks)))
        for one, other in zip(*records, strict=True):
            assert len(set(one.losses)) == len(one.losses), optimizer.blocks[one.block].name
            assert one.losses == pytest.approx(other.losses, abs=1e-5)


ROWS = {
    "encoder.block.1": [4, 4, 4, 8, 8, 8],  # its own call for each point, and two rows of everything afterwards
    "decoder.block.1": [4, 4, 4, 4, 4, 8],  # the whole encoder runs once
    "decoder.final_layer_norm": [4, 4, 4, 4, 4],
    "shared": [8, 8, 8, 8, 8],  # the points part before the first layer
}


def test_the_layers_before_the_active_block_run_once_and_options_share_their_context() -> None:
    model = seq2seq("t5")
    objective = Engine(model).objective(BATCH, LABELS)
    assert objective.rows[0][0].tokens.shape == (4, 8)
    assert objective.rows[0][0].inputs.shape == (4, 4)  # eight options; those that begin alike share a string
    rows: list[int] = []
    for stack in (model.encoder, model.decoder):
        for layer in stack.block:
            kept = layer.layer[-1]
            kept.register_forward_hook(lambda module, args, out: rows.append(len(out)))
    optimizer = zb.mezo_bcd(model, lr=0.0, eps=1e-2)
    seen = {}
    for _ in optimizer.blocks:
        optimizer.listener = lambda record: seen.update({optimizer.blocks[record.block].name: list(rows)})
        rows.clear()
        optimizer.step(objective)
    assert {name: seen[name] for name in ROWS} == ROWS


def test_a_row_of_pairs() -> None:
    row = pair([Encoded((5, 6, 7), ((1, 2), (1, 3, 4), (8,))), Encoded((9,), ((2,), (3,)))], start=60, padding=50)
    assert row.tokens.tolist() == [[5, 6, 7], [9, 50, 50]]
    assert row.mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert row.inputs.tolist() == [[60, 1, 3], [60, 50, 50]]  # one string for three options, one for two
    assert row.context.tolist() == [0, 1]
    places = row.keep[row.source].tolist()
    assert list(zip(places, row.target.tolist(), strict=True)) == [
        (0, 1), (1, 2), (0, 1), (1, 3), (2, 4), (0, 8), (3, 2), (3, 3)
    ]  # fmt: skip
    assert (row.lengths.tolist(), row.slots.tolist()) == ([2, 3, 1, 1, 1], [[0, 1, 2], [3, 4, 5]])


def test_a_model_whose_decoder_cannot_be_handed_contexts_says_so_and_scores_the_same() -> None:
    model = seq2seq("fsmt")
    with pytest.warns(ZeroBlockWarning, match="FSMTForConditionalGeneration is evaluated on padded rows, one point .*"):
        engine = Engine(model)
    assert (engine.shares, engine.forked) == (False, False)
    found = [-score.mean for scores in engine.scores(BATCH) for score in scores]
    assert found == pytest.approx(list(chain(*losses(model))), abs=1e-5)
    optimizer = zb.mezo_bcd(model, lr=1e-3, eps=1e-3)
    assert float(optimizer.step(engine.objective(BATCH, LABELS))) > 0


BATCHED = {
    "input_ids": torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0], [9, 3, 4, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]),
    "labels": torch.tensor([[5, 6, 2], [7, 2, -100], [-100, 8, 9]]),
}


@pytest.mark.parametrize("name", ["t5", "flan-t5", "bart", "mbart"])
@pytest.mark.parametrize("max_tokens", [None, 7])
def test_a_collated_batch_has_the_models_own_loss(name: str, max_tokens: int | None) -> None:
    model = seq2seq(name)
    engine = Engine(model, max_tokens=max_tokens)
    shifted = {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(BATCHED["labels"])}
    for batch in (BATCHED, {**BATCHED, **shifted}):
        with torch.no_grad():
            own = float(model(**batch).loss)
            assert float(engine.objective_from(batch)()) == pytest.approx(own, abs=1e-5)
    records = []
    for closure in (engine.objective_from(BATCHED), lambda: model(**BATCHED).loss):
        optimizer = zb.mezo_bcd(model, lr=0.0, eps=1e-2)
        optimizer.listener = records.append
        for _ in optimizer.blocks:
            optimizer.step(closure)
    assert engine.forked, engine.reason
    half = len(records) // 2
    for one, other in zip(records[:half], records[half:], strict=True):
        assert one.losses == pytest.approx(other.losses, abs=1e-5)


def test_what_cannot_work_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    model = seq2seq("t5")
    engine = Engine(model)
    with pytest.raises(
        ZeroBlockError, match=r"is an encoder-decoder, and an example is not encoded for one: .* seq2seq=True"
    ):
        engine.scores([Encoded((3, 4), ((5,), (6,)))])
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    decoder = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **shape))
    with pytest.raises(ZeroBlockError, match=r"LlamaForCausalLM continues the context, .* seq2seq=False"):
        Engine(decoder).scores(BATCH)
    with pytest.raises(ZeroBlockError, match=r"an encoder-decoder, .* leave out hold"):
        Engine(model, hold=True)
    with pytest.raises(BridgeError, match="every label is -100"):
        engine.objective_from({**BATCHED, "labels": torch.full((3, 2), -100)})
    with pytest.raises(BridgeError, match="the batch has position_ids"):
        engine.objective_from({**BATCHED, "position_ids": BATCHED["labels"]})
    model.config.decoder_start_token_id = None
    model.generation_config.decoder_start_token_id = None
    with pytest.raises(ZeroBlockError, match=r"set model\.config\.decoder_start_token_id"):
        Engine(model)
    speech = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 32, "pad_token_id": 0}
    with pytest.raises(ZeroBlockError, match=r"ProphetNet\w+ scores padded texts differently .*\(\*\*batch\)\.loss"):
        Engine(seq2seq("prophetnet"))
    whisper = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**speech, **heads))
    with pytest.raises(ZeroBlockError, match=r"WhisperForConditionalGeneration is an enc.*\(\*\*batch\)\.loss"):
        Engine(whisper)


def test_what_cannot_be_forked_is_measured_one_point_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    model = seq2seq("t5")
    engine = Engine(model)
    objective = engine.objective(BATCH, LABELS)
    expected = zb.mezo_bcd(model, lr=0.0, eps=1e-2).step(lambda: objective())

    def broken(self: fork.Fork, value: object) -> object:
        raise RuntimeError("out of rows")

    monkeypatch.setattr(fork.Fork, "_wide", broken)
    with pytest.warns(ZeroBlockWarning, match="is measured one point after another: RuntimeError: out of rows"):
        found = zb.mezo_bcd(model, lr=0.0, eps=1e-2).step(objective)
    assert (float(found), engine.forked) == (float(expected), False)


def test_gradients_of_backpropagation_are_the_models_own() -> None:
    model = seq2seq("t5")
    loss = Engine(model).objective_from(BATCHED)()
    loss.backward()
    found = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    model(**BATCHED).loss.backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(found[name], param.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_streamed_weights_give_the_same_losses(name: str) -> None:
    records: list[list[zb.Record]] = []
    for streams in (False, True):
        model = seq2seq(name)
        if streams:
            zb.shelve(model, "host", device="cpu")
        engine = Engine(model)
        assert (engine.forked, engine.shelf.streams) == (True, streams)
        optimizer = zb.mezo_bcd(model, lr=1e-3, eps=1e-2)
        records.append([])
        optimizer.listener = records[-1].append
        for _ in optimizer.blocks:
            optimizer.step(engine.objective(BATCH, LABELS))
    assert records[0] == records[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["t5", "flan-t5", "bart"])
def test_forked_is_sequential_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    model = seq2seq(name, dtype).cuda()
    engine = Engine(model)
    assert (engine.forked, engine.graphs) == (True, None)
    with pytest.raises(ZeroBlockError, match="leave out graphs"):
        Engine(model, graphs=True)
    objective = engine.objective(BATCH, LABELS)
    records: list[zb.Record] = []
    for closure in (objective, lambda: objective()):
        optimizer = zb.mezo_bcd(model, lr=0.0, eps=1e-2, seed=3)
        optimizer.listener = records.append
        for _ in optimizer.blocks:
            optimizer.step(closure)
        optimizer.flush()
    assert engine.forked, engine.reason
    half, tolerance = len(records) // 2, 1e-4 if dtype == torch.float32 else 0.05
    for one, other in zip(records[:half], records[half:], strict=True):
        assert one.losses == pytest.approx(other.losses, abs=tolerance)
