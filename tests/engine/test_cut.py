"""A pass in pieces is the pass: for every family, block and piece, on the CPU, without a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decoder import BATCH, CONFIGS, LABELS, decoder
from torch import Tensor, nn

import zeroblock as zb
from zeroblock.engine import Engine, trial
from zeroblock.engine.cut import CutError, find


class OnePiece:
    """Runs one piece of a pass, from what the last one left behind, and nothing else."""

    def __init__(self, wanted: int, first: dict[int, Any], carry: Tensor | None, rows: list[int]) -> None:
        self.wanted, self.first, self.carry, self.rows = wanted, first, carry, rows
        self.running, self.ran = wanted == 0, 0

    def arguments(self, layer: int, args: Any, kwargs: Any) -> Any:
        return self.first.setdefault(layer, (args, kwargs))

    def cut(self, piece: int, hidden: Tensor) -> Tensor | None:
        if self.running:
            self.carry, self.running = hidden.clone(), False
        return self.carry if piece == self.wanted else None

    def after(self, piece: int) -> Tensor:
        return torch.full((self.rows[piece + 1], *self.carry.shape[1:]), torch.nan)

    def parts(self, piece: int) -> bool:
        return self.rows[piece + 1] > self.rows[piece]

    @contextlib.contextmanager
    def trying(self, piece: int) -> Iterator[bool]:
        yield True  # twice, so that a try that leaves something behind shows

    def begin(self, piece: int) -> None:
        self.running, self.ran = True, self.ran + 1


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("method", ["mezo_bcd", "mezo", "lozo"])
def test_pieces_give_the_losses_of_the_pass(name: str, method: str) -> None:
    if method != "mezo_bcd" and name not in ("llama-tied", "opt", "gemma3", "gpt2"):
        pytest.skip("one method for every family, every method for four")
    model = decoder(name)
    engine = Engine(model)
    engine.cuts = trial.cuts(engine, (1, 1))
    assert engine.cuts is not None
    optimizer = zb.METHODS[method](model, lr=0.0, eps=1e-2)
    objective = engine.objective(BATCH, LABELS)
    for _ in optimizer.blocks:
        plan = optimizer.plan()
        try:
            whole = objective.losses(plan.points)
        except zb.ZeroBlockError as error:  # experts that see some of the tokens
            pytest.skip(str(error))
        active = objective._active(plan)
        rows = [1]
        for piece in range(engine.cuts.pieces):
            rows.append(len(plan.points) if piece in active else rows[-1])
        first: dict[int, Any] = {}
        carry, losses = None, None
        for piece in range(engine.cuts.pieces):
            tape = OnePiece(piece, first, carry, rows)
            if piece == 0:
                tape.carry = torch.zeros(1, len(objective.rows[0][0].tokens), 32)
            losses = objective.losses(plan.points, tape)
            carry = tape.carry
            assert tape.ran == (piece > 0)
        assert torch.equal(whole, losses)
        optimizer.step(objective)


class Peculiar(nn.Module):
    """A stack of layers that does something between them."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit = habit
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.habit == "computes":
                x = x + 1
            if self.habit == "twice":
                x = layer(x)
            if self.habit == "head":
                x = self.head(x)
            if self.habit == "reads":
                torch.relu(self.layers[0].weight)
        return self.head(x)


@pytest.mark.parametrize(
    ("habit", "reason"),
    [("computes", "between"), ("twice", "more than once"), ("head", "between"), ("reads", "read outside")],
)
def test_a_pass_that_cannot_be_cut_says_why(habit: str, reason: str) -> None:
    model = Peculiar(habit)
    with pytest.raises(CutError, match=reason):
        find(model, lambda: model(torch.ones(1, 4)))


def test_a_layer_that_hands_on_more_than_hidden_states_is_not_cut() -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor, beside: Tensor) -> Tensor:
            return x + beside

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, x: Tensor) -> Tensor:
            first = self.layers[0](x, x)
            return self.layers[1](first, first[:, :4] * 2)

    model = Model()
    with pytest.raises(CutError, match="more than the last one's"):
        find(model, lambda: model(torch.ones(1, 4)))
