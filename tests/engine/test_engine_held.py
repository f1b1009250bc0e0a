"""Steps that stay on a block and a batch skip the layers before the block, and measure the same bits."""

from __future__ import annotations

import pytest
import torch
from decoder import specimen

import zeroblock as zb
from zeroblock.engine import Engine
from zeroblock.schedule.base import Blind


def losses(name: str, method: str, hold: bool) -> tuple[list[tuple[float, ...]], int]:
    model, batch, labels = specimen(name)
    engine = Engine(model, hold=hold)
    objective = engine.objective(batch, labels)
    optimizer = zb.METHODS[method](model, 1e-2, interval=3)
    found = []
    for _ in range(3 * len(optimizer.blocks)):
        optimizer.step(objective)
        found.append(optimizer.record.losses)
    return found, engine.prefix.skipped if engine.prefix else 0


@pytest.mark.parametrize(("name", "method"), [("llama-tied", "mezo_bcd"), ("opt", "mezo_bcd"), ("gpt2", "lezo")])
def test_a_held_prefix_gives_the_same_losses(name: str, method: str) -> None:
    held, skipped = losses(name, method, hold=True)
    fresh, none = losses(name, method, hold=False)
    assert held == fresh
    assert len(set(held)) == len(held)
    assert none == 0
    assert skipped == 2 * (0 + 1 + 2 + 3) if method == "mezo_bcd" else skipped > 0  # two of three steps of each turn


@pytest.mark.parametrize("between", ["another engine", "a closure"])
def test_a_step_on_an_earlier_block_by_another_objective_is_seen(between: str) -> None:
    """The library's own kernels write to the weights, and torch does not notice."""

    class Alternating(Blind):
        def pick(self, turn: int, n: int, seed: int, scores: list[float]) -> int:
            return 1 if turn % 2 else 3

    found = []
    for hold in (True, False):
        model, batch, labels = specimen("llama-tied")
        held, other = Engine(model, hold=hold).objective(batch, labels), Engine(model).objective(batch[:2], labels[:2])
        optimizer = zb.mezo_bcd(model, 3e-2, eps=1e-2, schedule=Alternating())
        losses = []
        for step in range(6):
            different = other if between == "another engine" else other.__call__
            optimizer.step(different if step % 2 else held)
            losses.append(optimizer.record.losses)
        found.append(losses)
    assert found[0] == found[1]


def test_whatever_changes_is_computed_again() -> None:
    model, batch, labels = specimen("llama-tied")
    engine = Engine(model, hold=True)
    objective, other = engine.objective(batch, labels), engine.objective(batch[:2], labels[:2])
    optimizer = zb.mezo_bcd(model, 0.0, schedule=zb.Descending(), interval=100, seed=1)

    def skips(measured: object) -> int:
        before = engine.prefix.skipped
        expected = Engine(model).objective(*((batch, labels) if measured is objective else (batch[:2], labels[:2])))
        got, want = measured.measure(optimizer.plan().points), expected.measure(optimizer.plan().points)
        assert torch.equal(got, want)
        return engine.prefix.skipped - before

    assert [skips(objective), skips(objective)] == [0, 3]
    assert [skips(other), skips(objective), skips(objective)] == [0, 0, 3]  # another batch
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)  # another prefix
    assert [skips(objective), skips(objective)] == [0, 3]
    model.model.embed_tokens.weight.data.mul_(1.5)  # unseen by versions
    engine.prefix.forget()
    assert [skips(objective), skips(objective)] == [0, 3]
    objective()  # at the weights as they are: nothing is held for it, and nothing is lost
    assert skips(objective) == 3
