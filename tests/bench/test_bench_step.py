"""Rows of ``bench step``: what is measured, on which examples, and the floors beside it."""

from __future__ import annotations

import dataclasses
import math
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from bench_model import RAGGED, SINGLE, build, pool

import zeroblock as zb
from zeroblock.bench import batch, variant
from zeroblock.bench import row as rows_of
from zeroblock.bench.batch import Load
from zeroblock.bench.ceiling import Ceiling
from zeroblock.bench.cost import CostRow
from zeroblock.bench.row import BenchRow, Row
from zeroblock.bench.run import RunRow
from zeroblock.bench.step import Sampling, measure
from zeroblock.errors import ZeroBlockError

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def rows() -> list[BenchRow]:
    methods = ["mezo_bcd", "mezo-reference", "mezo_bcd-reference", "lozo", "mezo_bcd_adam"]
    choices = variant.choose(methods, ["sequential", "forked"])
    sampling = Sampling(batch_size=4, steps=21, interval=2)
    return list(measure(build(), pool(), choices, sampling, names=("tiny", "sst2")))


def test_every_method_meets_every_engine_after_the_published_ones(rows: list[BenchRow]) -> None:
    found = [(row.method, row.engine) for row in rows]
    assert found[:2] == [("mezo-reference", "reference"), ("mezo_bcd-reference", "reference")]
    assert set(found[2:]) == {(m, e) for m in ("mezo_bcd", "lozo", "mezo_bcd_adam") for e in variant.ENGINES}


def test_rows_hold_what_was_measured(rows: list[BenchRow]) -> None:
    base = rows[0]
    weights = sum(p.numel() for p in build().parameters()) * 4
    for row in rows:
        assert (row.model, row.task, row.device, row.dtype, row.batch_size) == ("tiny", "sst2", "cpu", "float32", 4)
        assert 0 < row.q20_ms <= row.median_ms <= row.q80_ms
        assert row.weights_bytes == weights
        assert row.ratio_to_reference == pytest.approx(base.mean_ms / row.mean_ms, rel=1e-2)
        assert row.ratio_of_medians == pytest.approx(base.median_ms / row.median_ms, rel=1e-2)
        assert row.gemm_floor_ms is not None
        assert row.gemm_floor_ms > 0 < row.copy_floor_ms
        assert "torch" in row.versions
    assert base.ratio_to_reference == base.ratio_of_medians == 1.0


def test_block_methods_are_measured_over_whole_cycles(rows: list[BenchRow]) -> None:
    steps = {row.method: (row.cycle, row.steps) for row in rows}
    assert steps["mezo-reference"] == steps["lozo"] == (1, 25)
    assert steps["mezo_bcd"] == steps["mezo_bcd-reference"] == (5, 25)
    assert steps["mezo_bcd_adam"] == (10, 50)
    assert len({(row.tokens, row.tokens_padded) for row in rows}) == 1  # the same batches, each as often


def test_without_mezo_there_is_no_ratio() -> None:
    choices = variant.choose(["mezo_bcd"], ["sequential"])
    (row,) = measure(build(), pool(), choices, Sampling(4, 2, quick=True, warmup=0), names=("tiny", "sst2"))
    assert row.ratio_to_reference is None
    assert row.ratio_of_medians is None
    assert row.steps == 2


def test_warm_up_and_measurement_lengths() -> None:
    assert Sampling(steps=20).lengths(1, 43, False) == (3, 43)
    assert Sampling(steps=20).lengths(1, 43, True) == (43, 43)
    assert Sampling(steps=20).lengths(43, 43, False) == (43, 43)
    assert Sampling(steps=50).lengths(43, 43, False) == (43, 86)
    assert Sampling(steps=20, warmup=5).lengths(43, 43, True) == (5, 43)
    assert Sampling(steps=2, quick=True).lengths(43, 43, False) == (3, 2)
    assert Sampling(steps=50).lengths(43, 43, True) == (86, 86)
    assert Sampling(steps=20).lengths(129, 43, True) == (129, 129)
    assert Sampling(steps=5, quick=True).lengths(43, 43, True) == (5, 5)
    with pytest.raises(ZeroBlockError, match="at least 20, or --quick"):
        Sampling(steps=19)


@pytest.mark.parametrize("choice", variant.choose(["mezo_bcd", "mezo_bcd_adam", "mezo_bcd-reference"], ["forked"]))
def test_measurement_starts_where_the_warm_up_did(choice: variant.Choice) -> None:
    ready = variant.build(choice, build(), interval=2)
    mover = ready.reference if isinstance(ready, variant.Published) else ready.optimizer
    orders = []
    for _ in range(2):
        ready.rewind(3)
        orders.append([])
        for step in range(7):
            ready.step(pool().batch(step, 2))
            orders[-1].append(mover.steps)
            orders[-1].append(mover._block if isinstance(ready, variant.Published) else mover.record.block)
    assert orders[0] == orders[1]
    assert orders[0][-2] == 7
    assert len(set(orders[0][1::2])) > 1


@pytest.mark.parametrize(("steps", "start"), [(43, 7), (25, 25), (50, 0), (2, 0), (86, 14)])
def test_measured_steps_end_with_a_fold(steps: int, start: int) -> None:
    ready = variant.build(variant.Choice("lozo", "forked"), build())
    assert ready.optimizer.fold == 50
    ready.step(pool().batch(0, 2))
    ready.rewind(steps)
    assert ready.optimizer.steps == start
    assert not ready.optimizer.state_dict()["held"] or not any(
        held.any() for held in ready.optimizer.state_dict()["held"].values()
    )


def test_batches_are_the_same_for_everyone_and_go_round() -> None:
    examples = pool(6)
    first, second = examples.batch(0, 4), examples.batch(1, 4)
    assert first.encoded == examples.encoded[:4]
    assert second.encoded == examples.encoded[4:] + examples.encoded[:2]
    assert examples.batch(0, 4) == first


def test_sizes_of_a_batch() -> None:
    assert (SINGLE.tokens, SINGLE.padded, SINGLE.positions) == (17, 6 * 16, 3)
    # two contexts, and of the options what predicts something: 1 + 0 + 2, and 0 + 3
    assert (RAGGED.tokens, RAGGED.padded, RAGGED.positions) == (16 + 6, 5 * 16, 2 + 6)
    assert Load.of([SINGLE, RAGGED]) == Load(20, 88, 6)


def test_ids_are_folded_into_the_vocabulary() -> None:
    folded = pool().folded(10)
    assert max(max(one.context) for one in folded.encoded) < 10
    assert [len(one.context) for one in folded.encoded] == [len(one.context) for one in pool().encoded]


def test_encoded_examples_come_back(tmp_path: Path) -> None:
    batch.write(tmp_path / "a" / "sst2.jsonl", pool())
    assert batch.read(tmp_path / "a" / "sst2.jsonl", "options") == pool()


@pytest.mark.parametrize("line", ["{", '{"context": [1]}', '{"context": [1], "options": [[2]], "label": 1}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"context": [1], "options": [[2]], "label": 0}\n' + line + "\n")
    with pytest.raises(ZeroBlockError, match=r"bad\.jsonl:2: needs"):
        batch.read(path, "options")


def test_forked_floor_is_the_mean_over_blocks() -> None:
    blocks = zb.layers(build())
    assert [b.name.rpartition(".")[2] for b in blocks] == [
        "embed_tokens",
        "embed_positions",
        "0",
        "1",
        "final_layer_norm",
    ]
    ceiling = Ceiling(model := build())
    ceiling._times = {("layers", 10): 2.0, ("layers", 20): 3.0, ("head", 4): 0.5, ("head", 8): 0.7}
    # a layer takes 1 ms on one row, 1.5 on two; the tied head is apart in the first block
    wanted = [3 + 2 * 0.5, 3 + 0.7, 2 + 1.5 + 0.7, 1 + 2 + 0.7, 2 + 0.7]
    assert ceiling.forked_ms(10, 4, zb.layers(model)) == pytest.approx(sum(wanted) / 5)
    assert ceiling.forked_ms(10, 4, zb.whole(model)) == pytest.approx(2 * 2 + 2 * 0.5)
    assert ceiling.forked_ms(10, 4, zb.whole(model), shared=True) == pytest.approx(3 + 0.7)
    assert ceiling.packed_ms(10, 4) == pytest.approx(2 * (2 + 0.5))


def test_ceiling_follows_weights_that_get_new_storage() -> None:
    model = build()
    ceiling = Ceiling(model)
    for param in model.parameters():
        param.data = param.data.clone()
    held = {p.data_ptr() for layer in ceiling.matrices for p in layer}
    assert held <= {p.data_ptr() for p in model.parameters()}
    assert ceiling.layers_ms(4) > 0


def test_bytes_that_must_be_moved() -> None:
    model = build()
    weights = sum(p.nbytes for p in model.parameters())
    copied = {
        (c.method, c.engine): variant.build(c, model).copied() / weights
        for c in variant.choose(
            ["mezo-reference", "mezo_bcd-reference", "mezo", "lozo", "mezo_bcd_adam"], ["sequential", "forked"]
        )
    }
    assert copied["mezo-reference", "reference"] == 8
    assert copied["mezo_bcd-reference", "reference"] == pytest.approx(8 / 5)
    assert copied["mezo", "sequential"] == 6
    assert copied["mezo", "forked"] == 5
    assert copied["lozo", "forked"] == 2 / 50  # folded once a turn
    assert copied["mezo_bcd_adam", "forked"] == pytest.approx((5 + 4) / 5)


def test_rows_survive_the_csv(tmp_path: Path, rows: list[BenchRow]) -> None:
    path = tmp_path / "results" / "bench.csv"
    rows_of.append(path, rows[:1], BenchRow)
    rows_of.append(path, rows[1:], BenchRow)
    assert rows_of.read(path, BenchRow) == rows
    bare = dataclasses.replace(rows[0], peak_bytes=None, ratio_to_reference=None, gemm_floor_ms=None)
    rows_of.append(path, [bare], BenchRow)
    assert rows_of.read(path, BenchRow)[-1] == bare
    assert rows_of.latest(rows_of.read(path, BenchRow)) == [*rows[1:], bare]
    elsewhere = dataclasses.replace(bare, machine="another")
    assert rows_of.latest([*rows, bare, elsewhere]) == [*rows[1:], bare, elsewhere]
    for odd in ({"engine": "fork"}, {"mean_ms": math.nan}):
        rows_of.append(tmp_path / "odd.csv", [dataclasses.replace(bare, **odd)], BenchRow)
        with pytest.raises(ZeroBlockError, match="row 1 is not a row of bench step"):
            rows_of.read(tmp_path / "odd.csv", BenchRow)
        (tmp_path / "odd.csv").unlink()


def test_a_csv_of_something_else_is_left_alone(tmp_path: Path, rows: list[BenchRow]) -> None:
    path = tmp_path / "noise.csv"
    path.write_text("operation,ms\ncopy,1\n")
    with pytest.raises(ZeroBlockError, match="other columns"):
        rows_of.append(path, rows, BenchRow)
    assert path.read_text() == "operation,ms\ncopy,1\n"


def test_a_model_that_cannot_be_forked_is_left_out_aloud() -> None:
    config = transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)
    model = transformers.AutoModelForCausalLM.from_config(config)
    choices = variant.choose(["mezo"], ["forked", "sequential"])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", zb.ZeroBlockWarning)
        rows = list(measure(model, pool(), choices, Sampling(2, 1, quick=True, warmup=0), names=("tiny", "sst2")))
    assert any("mezo, forked is left out: MambaForCausalLM cannot be forked" in str(w.message) for w in said)
    assert [(row.engine, row.gemm_floor_ms) for row in rows] == [("sequential", None)]


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    model = build().half().cuda()
    choices = variant.choose(["mezo-reference", "mezo_bcd"], ["sequential", "forked"])
    found = list(measure(model, pool(), choices, Sampling(4, 3, quick=True), names=("tiny", "sst2")))
    assert [row.device for row in found] == ["cuda"] * 3
    assert all(row.peak_bytes and row.peak_bytes >= row.weights_bytes for row in found)
    assert torch.isfinite(torch.tensor([row.mean_ms for row in found])).all()


@pytest.mark.parametrize(("name", "kind"), [("bench.csv", BenchRow), ("run.csv", RunRow), ("cost.csv", CostRow)])
def test_rows_of_earlier_versions_are_read_and_kept_in_their_order(name: str, kind: type[Row], tmp_path: Path) -> None:
    """The files of results/ have their columns in another order than a new file would."""
    path = tmp_path / name
    shutil.copy(RESULTS / name, path)
    before = rows_of.read(path, kind)
    assert before
    rows_of.append(path, before[-1:], kind)
    first, *_, again, last = path.read_text(encoding="utf-8").splitlines()
    assert last == again
    assert sorted(first.split(",")) == sorted(kind.columns())
    assert rows_of.read(path, kind) == [*before, before[-1]]
    rows_of.append(tmp_path / "new.csv", before, kind)
    assert rows_of.read(tmp_path / "new.csv", kind) == before
    assert (tmp_path / "new.csv").read_text().partition("\n")[0].endswith("machine,versions,date")
