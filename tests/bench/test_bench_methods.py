"""The step of every method: one row each, and the reason where a method cannot run."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import bench_model
import pytest

from zeroblock.bench import methods
from zeroblock.bench.methods import measure, table


def test_every_method_gets_a_row_and_a_failure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = methods._sample

    def failing(model: object, name: str, *rest: object) -> dict[str, object]:
        if name == "mezo_adam":
            raise MemoryError
        return sample(model, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(methods, "_sample", failing)
    names = ["mezo_bcd", "mezo_adam", "lozo", "mezo_svrg"]
    rows = list(
        measure(bench_model.build(), bench_model.pool(), names, names=("toy", "sst2"), batch_size=2, seconds=0.01)
    )
    assert [row.method for row in rows] == names
    assert [row.error for row in rows] == ["", "it does not fit in memory", "", ""]
    block, failed, lozo, _ = rows
    assert block.blocks == 5
    assert block.steps % 5 == 0 or block.steps >= 3
    assert (block.points, lozo.points) == (2, 2)
    assert failed.mean_ms is None
    lines = table(rows)
    assert "it does not fit in memory" in lines[-1]
    assert any(line.startswith("| mezo_bcd | 5 | 2 | no |") and "| 1.00 |" in line for line in lines)
    late = list(
        measure(bench_model.build(), bench_model.pool(), ["mezo"], names=("toy", "sst2"), until=time.monotonic())
    )
    assert late[0].error == "no time was left to measure it"


@pytest.mark.parametrize(("cycles", "expected"), [(0, 1), (2, 3), (99, methods.MAX_WARM_UP_CYCLES)])
def test_the_warm_up_ends_when_a_cycle_captures_nothing(
    cycles: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps whose graphs are still captured would be timed with them."""
    engine: Any = SimpleNamespace(graphs=SimpleNamespace(captures=0))
    taken: list[int] = []

    def take(*args: Any, **more: Any) -> None:
        engine.graphs.captures += len(taken) < cycles
        taken.append(engine.graphs.captures)

    monkeypatch.setattr(methods, "_take", take)
    methods._warm_up(None, engine, None, 0.1, 5)  # type: ignore[arg-type]
    assert len(taken) == expected
