"""Sharded weights take the steps of whole ones, to the bit: FSDP2, tensor parallel, and both."""

from __future__ import annotations

from pathlib import Path

import pytest
import shard_case
import torch
from pool import Pool

from toy import same
from zeroblock.journal import Header
from zeroblock.journal.format import dump
from zeroblock.method import METHODS
from zeroblock.train import snapshot

LIKE = {torch.float32: 2, torch.bfloat16: 4}
"""Ranks by dtype: two with uneven shards, four of which some are empty."""


WHOLE = ("hizoo", "conmezo", "subzero", "zo_muon", "eggroll", "mezo_svrg")
"""Methods that need whole tensors, and say so."""
DIVIDED = [name for name in METHODS if name not in WHOLE]


@pytest.mark.parametrize("dtype", LIKE, ids=str)
def test_fsdp_equals_one_process(pool: Pool, dtype: torch.dtype) -> None:
    """Every method; each rank has its own data, whose losses are averaged."""
    size = LIKE[dtype]
    outcomes = pool.run(shard_case.together, tuple(DIVIDED), dtype, size, size=size)
    for name in DIVIDED:
        weights, coeffs = shard_case.alone(name, dtype, size)
        for outcome in outcomes:
            assert outcome[name][1] == coeffs, name
            assert same(outcome[name][0], weights), name


def test_the_sizes_of_adapters_are_those_of_whole_matrices(pool: Pool) -> None:
    pytest.importorskip("peft")
    for whole, sharded in pool.run(shard_case.sized, 2, size=2):
        assert sharded == whole
        assert len(whole) == 4


@pytest.mark.parametrize("way", ["data", "probes"])
def test_pairs_of_shards_share_data_or_probes(pool: Pool, way: str) -> None:
    options = {"shares": 2} if way == "data" else {"probes": 2}
    expected = shard_case.alone("mezo", torch.bfloat16, **options)
    for weights, coeffs in pool.run(shard_case.across, "mezo", torch.bfloat16, way):
        assert coeffs == expected[1]
        assert same(weights, expected[0])


@pytest.mark.parametrize("way", ["tp", "both", "hybrid", "columns"])
def test_given_coefficients_move_every_kind_of_shard(pool: Pool, way: str) -> None:
    names = ("mezo_adam", "lozo_m", "sparse_mezo") if way != "hybrid" else ("mezo",)
    expected = shard_case.arranged(names, torch.bfloat16, None)
    for outcome in pool.run(shard_case.arranged, names, torch.bfloat16, way):
        for name in names:
            assert same(outcome[name], expected[name]), name


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("probes", "share the probes across the shards"),
        ("flat", "fully_shard"),
        ("state", "saved with other shards"),
        ("basis", "take the subspace"),
        ("rule", "the rule Cone needs whole tensors"),
        ("anchor", "take another method"),
        ("dimensions", "choose other placements"),
    ],
)
def test_what_cannot_work_names_the_fix(pool: Pool, way: str, reason: str) -> None:
    for said in pool.run(shard_case.refused, way, size=4 if way == "dimensions" else 2):
        assert reason in said


def test_journals_know_no_shards(pool: Pool, tmp_path: Path) -> None:
    """The base of a sharded run is that of a whole one; records of one replay on the other, and files load into it."""
    model, records = shard_case.Toy(), []
    optimizer = METHODS["mezo_bcd_adam"](model, lr=1e-2)
    header = Header.of(optimizer)
    for step in range(3):
        optimizer.step(shard_case.batch(model, step))
        records.append(optimizer.record)
    file = tmp_path / "tuned.zbj"
    file.write_bytes(dump(header, records))
    for theirs, weights in pool.run(shard_case.replayed, records, size=2):
        assert theirs == header
        assert same(weights, shard_case.gathered(optimizer))
    for weights, losses in pool.run(shard_case.loaded, str(file), size=2):
        assert same(weights, shard_case.gathered(optimizer))
        assert losses[0] == losses[2] != losses[1] == shard_case.batch(model, 0)().item()


def test_snapshots_hold_whole_tensors(pool: Pool, tmp_path: Path) -> None:
    """Saved by two ranks, loaded by two and by one; a rule's state is not saved, because shards cut it."""
    for weights in pool.run(shard_case.saved, "mezo", str(tmp_path / "shards"), size=2):
        model, records = shard_case.Toy(), shard_case.RECORDS
        optimizer = METHODS["mezo"](model, lr=1e-2)
        assert snapshot.load(tmp_path / "shards", optimizer, records) == ""
        assert optimizer.steps == len(records)
        assert same(weights, shard_case.gathered(optimizer))
    pool.run(shard_case.saved, "mezo_adam", str(tmp_path / "state"), size=2)
    assert not (tmp_path / "state").exists()


def test_states_of_shards_continue(pool: Pool) -> None:
    assert all(pool.run(shard_case.resumed, size=2))


def test_a_failed_pass_leaves_nothing_gathered(pool: Pool) -> None:
    assert all(pool.run(shard_case.interrupted, size=2))


@pytest.mark.parametrize("name", ["mezo_bcd", "lozo"])
def test_the_forked_pass_runs_on_gathered_layers(pool: Pool, name: str) -> None:
    expected = shard_case.forked(name, "whole")
    for outs in pool.run(shard_case.forked, name, "layers", size=2):
        assert [len(out) for out in outs] == [2] * len(outs)
        assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))


def test_what_is_not_gathered_whole_cannot_be_forked(pool: Pool) -> None:
    assert all("not gathered whole" in said for said in pool.run(shard_case.unforkable, size=2))
