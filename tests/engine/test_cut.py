"""A pass in pieces is the pass: for every family, block and piece, on the CPU, without a graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from decoder import CONFIGS, ENCODERS, decoder, specimen
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import zeroblock as zb
from zeroblock.engine import Engine, trial
from zeroblock.engine.cut import CutError, find
from zeroblock.ops import integer
from zeroblock.quantise import quantise_
from zeroblock.run.tape import GROUP, Piece, stretches
from zeroblock.step import Call


class Follower:
    """Skips the layers of a pass, and notes what they are called with."""

    def __init__(self, after: Tensor | None = None) -> None:
        self.after, self.calls, self.first = after, dict[int, Call](), None

    def enter(self, layer: int, hidden: Tensor, call: Call) -> None:
        self.first = hidden if layer == 0 else self.first
        self.calls[layer] = call

    def leave(self) -> tuple[Tensor, bool]:
        hidden = self.first if self.after is None else self.after
        return hidden, len(hidden) > 1


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, "mezo_bcd") for name in (*CONFIGS, *ENCODERS)),
        *itertools.product(["llama-tied", "opt", "gpt2"], ["mezo", "lozo"]),
    ],
)
def test_pieces_give_the_losses_of_the_pass(name: str, method: str) -> None:
    model, batch, labels = specimen(name)
    engine = Engine(model)
    engine.cuts = trial.cuts(engine, (1, 1))
    assert engine.cuts is not None
    optimizer = zb.METHODS[method](model, lr=0.0, eps=1e-2)
    objective = engine.objective(batch, labels)
    opening = Follower()
    objective.losses((), opening)  # at the weights as they are: what all layers are given
    for _ in optimizer.blocks:
        points = optimizer.plan().points
        try:
            whole = objective.losses(points)
        except zb.ZeroBlockError as error:  # experts that see some of the tokens
            pytest.skip(str(error))
        active = objective._active(optimizer.plan())
        hidden = opening.first
        if 0 in active:
            start = Follower()
            objective.losses(points, start)
            hidden = start.first
        with torch.no_grad(), objective.layers():
            for i, call in opening.calls.items():
                mine = points if i + 1 in active else ()
                hidden = objective.layer(i, hidden, call, mine, parted=len(hidden) > 1)
        assert torch.equal(objective.losses(points, Follower(hidden)), whole)
        optimizer.step(objective)


@pytest.mark.parametrize("layers", [1, GROUP - 1, GROUP, 2 * GROUP + 2])
@pytest.mark.parametrize("active", [(), (0,), (1,), (3,), (1, 4), "all"])
def test_every_layer_is_captured_in_one_group(layers: int, active: tuple[int, ...] | str) -> None:
    pieces, rows = [], 1
    for k in range(layers + 2):
        mine = active == "all" or k in active
        after = 2 if mine else rows
        pieces.append(Piece((k, rows, mine), mine, rows, after))
        rows = after
    found = stretches(pieces)
    assert [s.first + i for s in found for i in range(len(s.pieces))] == list(range(1, layers + 1))
    assert len({s.key for s in found}) == len(found) == -(-layers // GROUP)
    others = [piece._replace(key=(*piece.key, "elsewhere")) if piece.active else piece for piece in pieces]
    for mine, theirs in zip(found, stretches(others), strict=True):  # a group without an active layer is shared
        assert (mine.key == theirs.key) != any(piece.active for piece in mine.pieces)


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


@pytest.mark.parametrize(
    "beside", [lambda first: first[:, :4] * 2, lambda first: (first * 2)[:, :4]], ids=["new", "view"]
)
def test_a_layer_that_hands_on_more_than_hidden_states_is_not_cut(beside: Callable[[Tensor], Tensor]) -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor, beside: Tensor) -> Tensor:
            return x + beside

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, x: Tensor) -> Tensor:
            first = self.layers[0](x, x)
            return self.layers[1](first, beside(first))

    model = Model()
    with pytest.raises(CutError, match="more than the last one's"):
        find(model, lambda: model(torch.ones(1, 4)))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_trial_keeps_no_expanded_matrix(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them at once would be the model in 16 bits, which an int8 model is stored to avoid."""
    engine = Engine(quantise_(decoder("opt", torch.float32), kind))
    expanded: list[StorageWeakRef] = []
    most = 0

    def noted(stored: integer.Integers) -> Tensor:
        nonlocal most
        most = max(most, sum(not one.expired() for one in expanded))
        matrix = expand(stored)
        expanded.append(StorageWeakRef(matrix.untyped_storage()))
        return matrix

    expand = integer.expand
    monkeypatch.setattr(integer, "expand", noted)
    assert trial.cuts(engine, (1, 1)) is not None
    assert len(expanded) > 6
    assert most == 0
