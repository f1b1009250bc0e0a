"""Packing, and what happens to models that cannot be packed or forked."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from decoder import BATCH, CONFIGS, LABELS, decoder
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_equality import slow_scores

import zeroblock as zb
from toy import same, snapshot
from zeroblock.engine import Engine
from zeroblock.engine.objective import BatchObjective
from zeroblock.engine.pack import FIELDS, lay, pack, root, split
from zeroblock.run.graph import Graphs
from zeroblock.task import Encoded

ids = st.integers(3, 60)
options = st.lists(st.lists(ids, min_size=1, max_size=4).map(tuple), min_size=1, max_size=4).map(tuple)
encoded = st.builds(Encoded, st.lists(ids, min_size=1, max_size=9).map(tuple), options)


heads = st.lists(ids, max_size=5).map(tuple)


@given(st.lists(encoded, min_size=1, max_size=4), heads, st.sampled_from([1, 8]), st.sampled_from([1, 4]))
@settings(max_examples=60, deadline=None)
def test_a_token_sees_exactly_its_own_string(
    batch: list[Encoded], head: tuple[int, ...], multiple: int, scored: int
) -> None:
    """Follow every scored token back through the mask: what is seen, in order of position, is its string so far."""
    batch = [Encoded(head + one.context, one.options) for one in batch]
    row = pack(batch, multiple, scored)
    assert len(row.tokens) % multiple == len(row.keep) % scored == len(row.source) % scored == 0
    assert [part.data_ptr() for part in row.parts] == [getattr(row, name).data_ptr() for name in FIELDS]
    laid = sum(lay(one).cost for one in batch) - (len(batch) - 1) * root(batch)
    assert laid <= len(row.tokens) < laid + multiple
    sees, strings = row.sees(), [string for one in batch for string in one.rows]
    scored_by = [[n for n in span if n < len(row.source)] for span in row.spans.tolist()]
    assert len(scored_by) == len(strings)
    for number, (string, own) in enumerate(strings):
        assert row.lengths[number] == own == len(scored_by[number])
        for k, n in enumerate(scored_by[number]):
            place = int(row.keep[row.source[n]])
            seen = sees[place].nonzero().flatten()
            prefix = string[: len(string) - own + k]
            assert row.positions[seen].tolist() == list(range(len(prefix)))
            assert tuple(row.tokens[seen].tolist()) == prefix
            assert int(row.target[n]) == string[len(prefix)]


def test_single_token_options_cost_nothing() -> None:
    assert lay(Encoded((1, 2, 3), ((4,), (5,), (6,)))).cost == 3
    assert lay(Encoded((1, 2, 3), ((7, 4), (7, 5)))).cost == 4


@given(st.lists(encoded, min_size=1, max_size=8), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_rows_keep_to_the_budget(batch: list[Encoded], budget: int) -> None:
    rows = list(split([lay(one).cost for one in batch], budget))
    assert [i for row in rows for i in row] == list(range(len(batch)))
    for row in rows:
        assert len(row) == 1 or sum(lay(batch[i]).cost for i in row) <= budget


def tiny(config) -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("family", ["alibi", "recurrent"])
def test_a_model_that_cannot_be_packed_is_padded_and_says_so(family: str) -> None:
    if family == "alibi":
        config = transformers.FalconConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
        )
    else:
        config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    model = tiny(config)
    with pytest.warns(zb.ZeroBlockWarning, match="padded rows"):
        engine = Engine(model)
    assert not engine.forked
    got = [[score.total for score in scores] for scores in engine.scores(BATCH)]
    torch.testing.assert_close(
        [x for row in got for x in row], [x for row in slow_scores(model, BATCH) for x in row], rtol=1e-3, atol=1e-3
    )
    before = snapshot(model)
    optimizer = zb.mezo_bcd(model, lr=0.0, eps=1e-2)
    optimizer.step(engine.objective(BATCH, LABELS))
    assert optimizer.record.losses[0] != optimizer.record.losses[1]
    assert same(before, snapshot(model))


class Shifted(transformers.LlamaForCausalLM):
    """A parameter that no module of its own reads."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.shift = torch.nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + self.shift
        return out


def test_a_model_that_cannot_be_forked_says_so_once_and_goes_on() -> None:
    torch.manual_seed(0)
    model = Shifted(CONFIGS["llama"]()).eval()
    engine = Engine(model)
    objective = engine.objective(BATCH, LABELS)
    forked, sequential = (zb.mezo_bcd(model, lr=0.0, eps=1e-2) for _ in range(2))
    with pytest.warns(zb.ZeroBlockWarning, match="one point after another") as told:
        for _ in forked.blocks:
            forked.step(objective)
            sequential.step(lambda: objective())
            assert forked.record.losses[0] != forked.record.losses[1]
            assert forked.record.losses == pytest.approx(sequential.record.losses, abs=2e-6)
    assert len(told) == 1
    assert "shift" in engine.reason


def test_a_compiled_model_is_politely_refused() -> None:
    model = torch.compile(decoder("opt"), backend="eager")
    with pytest.warns(zb.ZeroBlockWarning, match="compiled"):
        engine = Engine(model)
    assert not engine.forked
    assert len(engine.scores(BATCH[:1])) == 1


@pytest.mark.parametrize("method", ["mezo", "mezo_bcd", "lozo"])
def test_an_exception_in_a_forked_pass_leaves_the_model_clean(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("llama-tied")
    engine = Engine(model)
    before, attention = snapshot(model), model.config._attn_implementation
    layer = model.model.layers[2].mlp
    calls = []

    def forward(x):
        calls.append(x)
        raise torch.OutOfMemoryError("full")

    layer.forward = forward
    optimizer = zb.METHODS[method](model, lr=1e-2, eps=1e-2)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step(engine.objective(BATCH, LABELS))
    assert calls
    assert layer.forward is forward
    del layer.forward
    assert same(before, snapshot(model))
    assert all("forward" not in vars(module) for module in model.modules())
    assert model.config._attn_implementation == attention
    optimizer.step(engine.objective(BATCH, LABELS))


def test_bad_arguments() -> None:
    model = decoder("opt")
    with pytest.raises(zb.ZeroBlockError, match="max_tokens"):
        Engine(model, max_tokens=0)
    with pytest.raises(zb.ZeroBlockError, match="CUDA"):
        Engine(model, graphs=True)
    with pytest.raises(zb.ZeroBlockError, match="at least one example"):
        Engine(model).objective([], [])


SUBMITTED: dict[str, Any] = {
    "mezo": functools.partial(zb.mezo, lr=1e-3),
    "mezo_bcd, clipped": functools.partial(zb.mezo_bcd, lr=1e-3, clip=0.5),
    "three probes": functools.partial(zb.mezo_bcd, lr=1e-3, probes=3),
    "one-sided": functools.partial(zb.ZeroOrder, lr=1e-3, estimator=zb.OneSided(probes=2)),
    "Bernoulli": functools.partial(zb.ZeroOrder, lr=1e-3, subspace=zb.Bernoulli(0.3), interval=3),
    "lozo, held": functools.partial(zb.lozo, lr=1e-3, interval=10, fold=5),
    "Adam": functools.partial(zb.mezo_bcd_adam, lr=1e-3, interval=5),
    "adaptive": functools.partial(zb.mezo_bcd_adaptive, lr=1e-3),
}


@pytest.fixture
def launched(late: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are submitted, and none is captured."""
    monkeypatch.setattr(Graphs, "pays", staticmethod(lambda tokens, weights: False))


@pytest.mark.parametrize("number", range(len(SUBMITTED)), ids=list(SUBMITTED))
def test_steps_that_leave_the_update_to_the_device_are_the_steps(number: int, launched: None) -> None:
    """As on a GPU, whose part is played by the CPU: the same records in order, the same weights to the bit.

    Each composition in one dtype, with a row or with several rows; each dtype with both, twice.
    """
    name, dtype = list(SUBMITTED)[number], (torch.float32, torch.bfloat16)[number % 2]
    max_tokens, ends = (None, 8)[number // 2 % 2], []
    for submitted in (True, False):
        model = decoder("llama-tied", dtype)
        engine = Engine(model, max_tokens=max_tokens)
        if submitted:
            engine.graphs = Graphs()
        optimizer, heard = SUBMITTED[name](model), []
        optimizer.listener = heard.append
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        for step in range(17):
            optimizer.step(engine.objective(BATCH if step % 2 else BATCH[::-1], LABELS if step % 2 else LABELS[::-1]))
            scheduler.step()
            if step == 11:
                optimizer.load_state_dict(optimizer.state_dict())
        assert bool(optimizer._queue) == (submitted and name != "adaptive")
        optimizer.flush()
        optimizer.settle()
        assert [record.step for record in heard] == list(range(17))
        ends.append((heard, snapshot(model)))
    assert ends[0][0] == ends[1][0]
    assert same(ends[0][1], ends[1][1])


def test_a_step_that_cannot_be_told_of_is_not_taken(launched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("llama-tied")
    engine, optimizer, before = Engine(model), zb.mezo_bcd(model, lr=1e-3), snapshot(model)
    engine.graphs = Graphs()
    join = torch.cat

    def full(tensors: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        if tensors[0].dtype == torch.float64:
            raise torch.OutOfMemoryError("no room for the step's numbers")
        return join(tensors, *arguments, **options)

    monkeypatch.setattr(torch, "cat", full)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step(engine.objective(BATCH, LABELS))
    assert optimizer.steps == 0
    assert same(snapshot(model), before)


def test_a_model_that_fails_forked_goes_on_one_point_after_another(
    launched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While steps are under way; what they measured comes first."""
    model = decoder("llama-tied")
    engine, optimizer, heard = Engine(model), zb.mezo_bcd_adam(model, lr=1e-3, interval=4), []
    engine.graphs = Graphs()
    optimizer.listener = heard.append
    losses = BatchObjective.losses

    def failing(self: BatchObjective, points: Any) -> torch.Tensor:
        if points and optimizer.steps == 2:
            raise RuntimeError("boom")
        return losses(self, points)

    monkeypatch.setattr(BatchObjective, "losses", failing)
    with pytest.warns(zb.ZeroBlockWarning, match="one point after another: RuntimeError: boom"):
        for _ in range(4):
            optimizer.step(engine.objective(BATCH, LABELS))
    optimizer.flush()
    assert engine.graphs is None
    assert [record.step for record in heard] == list(range(4))
