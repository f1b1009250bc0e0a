"""Every registered part, the library's and a stranger's, through every way that a step can take.

A new part joins by its line in a registry.  The plain path on the host is the reference; the
others must give the same weights, bit for bit, or say themselves that they cannot take the part.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import stranger
import zeroblock as zb
from toy import Tiny, next_token, same, snapshot
from zeroblock.estimator import ESTIMATORS
from zeroblock.journal import Header, Journal, read
from zeroblock.rule import RULES
from zeroblock.run import host
from zeroblock.schedule import SCHEDULES
from zeroblock.step import Called, Objective
from zeroblock.subspace import SUBSPACES

REGISTRIES = (SCHEDULES, SUBSPACES, ESTIMATORS, RULES)
PARTS = [pytest.param(registry.kind, cls, id=name) for registry in REGISTRIES for name, cls in registry.items()]
STEPS = 22

every_part = pytest.mark.parametrize(("kind", "cls"), PARTS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
dtypes_in_turn = pytest.mark.parametrize(
    ("kind", "cls", "dtype"),
    [pytest.param(*part.values, (torch.float32, torch.bfloat16)[i % 2], id=part.id) for i, part in enumerate(PARTS)],
)
every_stop = pytest.mark.parametrize(("dtype", "stop"), [(torch.float32, 12), (torch.bfloat16, 5)], ids=str)
"""Within the first turns of two steps, and where every schedule has gone round."""


def build(kind: str, cls: type, model: torch.nn.Module) -> zb.ZeroOrder:
    needs = {"estimator": zb.Curvature()} if cls is zb.Hessian else {}
    return zb.ZeroOrder(model, 1e-2, interval=2, seed=5, **{kind: cls()}, **needs)


def run(optimizer: zb.ZeroOrder, steps: int, wrap: Any = Called) -> list[zb.Record]:
    records: list[zb.Record] = []
    optimizer.listener = records.append
    while optimizer.steps < steps:
        optimizer.step(wrap(next_token(optimizer.model)))
    optimizer.flush()
    optimizer.listener = None
    return records


@functools.cache
def reference(kind: str, cls: type, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], list[zb.Record]]:
    """Weights and records of a run on the host."""
    model = Tiny(dtype=dtype)
    records = run(build(kind, cls, model), STEPS)
    return snapshot(model), records


def test_strangers_are_among_them() -> None:
    classes = {param.values[1] for param in PARTS}
    assert {stranger.Axis, stranger.ThreePoint, stranger.Lion, stranger.Loudest} < classes


@dtypes_in_turn
def test_host(kind: str, cls: type, dtype: torch.dtype) -> None:
    """Measuring changes no bit, every step moves its own block alone, and the losses of the points differ."""
    model = Tiny(dtype=dtype)
    optimizer = build(kind, cls, model)
    distances = []
    for _ in range(STEPS):
        before = snapshot(model)
        losses = host.measure(optimizer.plan(), Called(next_token(model))).losses.tolist()
        assert same(snapshot(model), before)
        active = {name for block, _ in optimizer.turn.active for name in optimizer.blocks[block].params}
        optimizer.step(next_token(model))
        assert optimizer.record is not None
        assert list(optimizer.record.losses) == losses
        distances.append(max(losses) - min(losses))
        moved = {name for name, weight in snapshot(model).items() if not torch.equal(weight, before[name])}
        assert moved <= active
    assert max(distances) > 0
    assert not same(snapshot(model), snapshot(Tiny(dtype=dtype)))


class Submitted(Objective):
    """Plays a GPU on the CPU: its steps are submitted, and their numbers arrive later."""

    submits = True
    steps = 0

    def __init__(self, closure: Any) -> None:
        self.closure = closure

    def __call__(self) -> Any:
        return self.closure()

    def submit(self, points: Any) -> torch.Tensor:
        Submitted.steps += 1
        return self.measure(points)


@dtypes_in_turn
def test_stream(kind: str, cls: type, dtype: torch.dtype, late: type) -> None:
    """A step whose numbers stay on the device, where the part allows it; otherwise the host takes it."""
    model = Tiny(dtype=dtype)
    optimizer = build(kind, cls, model)
    Submitted.steps = able = 0

    def submitted(closure: Any) -> Submitted:
        nonlocal able  # a subspace may have another basis for a block of vectors
        able += optimizer.plan().capturable
        return Submitted(closure)

    records = run(optimizer, STEPS, submitted)
    weights, expected = reference(kind, cls, dtype)
    assert records == expected
    assert same(snapshot(model), weights)
    assert Submitted.steps == able


def test_parts_that_cannot_run_on_the_device_say_so() -> None:
    """A basis with tensors of its own might be replayed from a stale graph: it is asked, under SGD too."""
    able = {param.values[1].__name__: build(*param.values, Tiny()).plan().capturable for param in PARTS}
    assert {name for name, yes in able.items() if not yes} == {
        "AnchorSGD", "Axis", "Cone", "Frames", "Hessian", "Lion", "Momentum", "Muon", "RecallAdam", "Sign"
    }  # fmt: skip


@every_part
@every_dtype
def test_journal_and_replay(kind: str, cls: type, dtype: torch.dtype, tmp_path: Path) -> None:
    """From the file alone: the header rebuilds the optimizer, the records the weights."""
    weights, records = reference(kind, cls, dtype)
    with Journal.create(tmp_path / "journal.zbj", Header.of(build(kind, cls, Tiny(dtype=dtype)))) as journal:
        for record in records:
            journal.append(record)
    contents = read(tmp_path / "journal.zbj")
    model = Tiny(dtype=dtype)
    optimizer = contents.header.rebuild(model)
    assert type(getattr(optimizer, kind)) is cls
    zb.replay(optimizer, contents.records)
    assert same(snapshot(model), weights)
    for read_again, measured in zip(contents.records, records, strict=True):
        assert read_again.losses == pytest.approx(measured.losses, abs=1e-5) or read_again.losses == ()


@every_part
@every_stop
def test_resume(kind: str, cls: type, dtype: torch.dtype, stop: int) -> None:
    """Some steps replayed, the rest measured: as if nothing had interrupted the run."""
    weights, records = reference(kind, cls, dtype)
    model = Tiny(dtype=dtype)
    optimizer = build(kind, cls, model)
    zb.replay(optimizer, records[:stop])
    assert run(optimizer, STEPS) == records[stop:]
    assert same(snapshot(model), weights)


@every_part
@every_stop
def test_state_dict(kind: str, cls: type, dtype: torch.dtype, stop: int) -> None:
    weights, records = reference(kind, cls, dtype)
    model = Tiny(dtype=dtype)
    first = build(kind, cls, model)
    run(first, stop)
    again = build(kind, cls, model)
    again.load_state_dict(first.state_dict())
    assert run(again, STEPS) == records[stop:]
    assert same(snapshot(model), weights)


@pytest.mark.parametrize("cls", SUBSPACES.values(), ids=list(SUBSPACES))
def test_kept_momentum_needs_a_basis_that_carries_it(cls: type) -> None:
    model = Tiny()
    optimizer = zb.ZeroOrder(model, 1e-2, subspace=cls(), rule=zb.Momentum(), interval=2)
    if optimizer.members[0].basis.carries:
        optimizer.step(next_token(model))
        return
    with pytest.raises(zb.ZeroBlockError, match="does not say how: use a rule with reset=True"):
        optimizer.step(next_token(model))
    assert same(snapshot(model), snapshot(Tiny()))


@pytest.mark.parametrize("cls", [*SUBSPACES.values()], ids=list(SUBSPACES))
def test_what_cannot_be_held_is_refused(cls: type) -> None:
    if cls().folds:
        zb.ZeroOrder(Tiny(), 1e-2, subspace=cls(), interval=4, fold=2)
        return
    with pytest.raises(zb.ZeroBlockError, match="leave it out"):
        zb.ZeroOrder(Tiny(), 1e-2, subspace=cls(), interval=4, fold=2)
