"""Many probes in one forked pass: the block's prefix runs once, and the losses are those of one point after another."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from decoder import BATCH, LABELS, decoder

import seq2seq_toy
import zeroblock as zb
from zeroblock.basis import OuterProduct
from zeroblock.engine import Engine
from zeroblock.engine.pair import Pairs
from zeroblock.offload.shelf import Shelf
from zeroblock.run import host
from zeroblock.step import Called
from zeroblock.turn import Turn

EGGROLL = functools.partial(zb.eggroll, rank=2)


@pytest.fixture(scope="module")
def llama() -> tuple[torch.nn.Module, Engine]:
    model = decoder("llama-tied")
    return model, Engine(model)


def at(optimizer: zb.ZeroOrder, block: int, objective: Any, sequential: bool = False) -> torch.Tensor:
    """The losses of a step on a block, which is not taken."""
    optimizer.enter(Turn(optimizer.steps, optimizer.turn.number, block, optimizer.turn.scores))
    return host.measure(optimizer.plan(), Called(objective) if sequential else objective).losses


@pytest.mark.parametrize("method", [zb.fzoo, EGGROLL, zb.mezo_greedy], ids=["fzoo", "eggroll", "greedy"])
def test_probes_share_the_prefix_and_are_split_where_rows_get_long(llama, method, monkeypatch) -> None:
    model, engine = llama
    objective = engine.objective(BATCH, LABELS)
    optimizer = method(model, 1e-3, 1e-2, partition=zb.layers, probes=4)
    calls: list[int] = []
    hooks = [
        layer.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
        for layer in model.model.layers[:2]
    ]
    points = len(optimizer.plan().points)
    try:
        last = len(model.model.layers)  # the embedding is block 0
        together = at(optimizer, last, objective)
        assert calls == [1, 1]  # two layers before the block, one row each
        assert len(set(together.tolist())) == points
        calls.clear()
        tokens = len(objective.rows[0][0].tokens)
        monkeypatch.setattr("zeroblock.engine.objective.POINT_TOKENS", 2 * tokens)
        split = at(optimizer, last, objective)
        passes = -(-points // 2)
        assert calls == [1, 1] * passes
        torch.testing.assert_close(split, together, rtol=0, atol=2e-6)
        alone = at(optimizer, 1, objective, sequential=True)
        torch.testing.assert_close(at(optimizer, 1, objective), alone, rtol=0, atol=2e-6)
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_memory_limits_the_points_of_a_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``--memory`` sets aside for rows is for two points; nine of them must not take more."""
    if name == "t5":
        model, batch, labels = seq2seq_toy.seq2seq("t5"), seq2seq_toy.BATCH, seq2seq_toy.LABELS
    else:
        model, batch, labels = decoder(name), BATCH, LABELS
    engine = Engine(model)
    optimizer, objective = zb.fzoo_bcd(model, 1e-3, 1e-2), engine.objective(batch, labels)
    row = objective.rows[0][0]
    tokens = row.tokens.numel() + (row.inputs.numel() if isinstance(row, Pairs) else 0)
    shelf, seen = Shelf(), list[int]()
    monkeypatch.setattr(engine, "shelf", shelf)
    totals = engine.totals

    def noted(row: Any, points: Any, **more: Any) -> torch.Tensor:
        seen.append(len(points))
        return totals(row, points, **more)

    monkeypatch.setattr(engine, "totals", noted)
    together = None
    for limit, most in ((None, 9), (2 * tokens, 2), (4 * tokens + 1, 4)):
        shelf.pass_tokens = limit
        losses = at(optimizer, 1, objective)
        together = losses if together is None else together
        torch.testing.assert_close(losses, together, rtol=0, atol=2e-6)
        assert sum(seen) == 9
        assert max(seen) == most
        seen.clear()


@pytest.mark.parametrize("name", ["opt", "gpt2", "mixtral"])
def test_outer_products_are_measured_beside_the_matrices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings, linear layers and transposed ones.

    Experts hold several matrices in one tensor, and OPT's positions are shifted: these are copied.
    """
    model = decoder(name)
    engine = Engine(model)
    objective = engine.objective(BATCH, LABELS)
    optimizer = EGGROLL(model, 1e-3, 1e-2, partition=zb.layers, probes=2)
    copies: list[object] = []
    perturbed = OuterProduct.perturbed
    monkeypatch.setattr(OuterProduct, "perturbed", lambda *args: copies.append(args) or perturbed(*args))
    for block in range(len(optimizer.blocks)):
        forked, copied = at(optimizer, block, objective), len(copies)
        assert not copied or name == "mixtral" or "positions" in optimizer.blocks[block].name
        torch.testing.assert_close(forked, at(optimizer, block, objective, sequential=True), rtol=0, atol=5e-6)
        copies.clear()


def test_points_around_an_anchor_run_in_the_same_pass(llama) -> None:
    model, engine = llama
    objective = engine.objective(BATCH, LABELS)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for partition in (zb.whole, zb.layers):
        optimizer = zb.mezo_svrg(model, 1e-2, 1e-2, interval=4, partition=partition)
        for _ in range(2):
            optimizer.step(objective)
        forked = host.measure(optimizer.plan(), objective).losses
        plain = host.measure(optimizer.plan(), Called(objective)).losses
        torch.testing.assert_close(forked, plain, rtol=0, atol=2e-6)
        assert abs(float(forked[0] - forked[2])) > 1e-5  # θ has left the anchor
        assert engine.forked
        model.load_state_dict(before, strict=False)


RATES = {"fzoo": 1e-2, "fzoo_bcd": 1e-2, "eggroll": 1e-2, "mezo_greedy": 1e-3, "adamezo": 5e-3, "mezo_svrg": 2e-4}

PROBES = {"fzoo": {"probes": 4}, "fzoo_bcd": {"probes": 4}, "eggroll": {"probes": 3}}


@pytest.mark.parametrize("name", RATES)
def test_a_transformer_learns(llama, name: str) -> None:
    model, engine = llama
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    objective = engine.objective(BATCH, LABELS, "answer")
    start, optimizer = float(objective()), zb.METHODS[name](model, RATES[name], 1e-3, **PROBES.get(name, {}))
    for _ in range(40):
        optimizer.step(objective)
    end = float(objective())
    model.load_state_dict(before, strict=False)
    assert end < 0.9 * start, (start, end)
